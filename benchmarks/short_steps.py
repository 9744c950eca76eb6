"""Does `fit` on several CPU devices of JAX come to its end, however short its steps are?

    python benchmarks/short_steps.py [--steps 20000] [--devices 2 3 4]

On a machine with few cores, JAX's CPU client can stop for good when many short programs with
collectives are in flight, and aborts after 40 seconds;
kerasdist/backends/jax/mesh/placement.py says why.
Each number of devices runs in a process of its own. The exit status is 0 if all of them finished.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time

BATCH = 4
FEATURES = 8


def run(devices: int, steps: int) -> float:
    """Trains for a number of steps, in this process, and returns how many a second."""
    import keras
    import numpy as np

    import kerasdist as kd

    strategy = kd.MirroredStrategy([f"cpu:{index}" for index in range(devices)])
    with strategy.scope():
        model = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(1)])
        model.compile(optimizer="sgd", loss="mse")
    x = np.random.default_rng(0).random((BATCH * steps, FEATURES), dtype="float32")
    y = x.sum(axis=1, keepdims=True)
    model.fit(x[:BATCH], y[:BATCH], batch_size=BATCH, verbose=0)  # compiles
    begin = time.perf_counter()
    model.fit(x, y, batch_size=BATCH, verbose=0)
    return steps / (time.perf_counter() - begin)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--devices", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument(
        "--here", action="store_true", help="in this process, for one number of devices"
    )
    arguments = parser.parse_args()
    if arguments.here:
        rate = run(arguments.devices[0], arguments.steps)
        print(
            f"{arguments.devices[0]} devices: {arguments.steps} steps, {rate:.0f} steps/s",
            flush=True,
        )
        return 0
    environment = os.environ | {"KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu"}
    failed = 0
    for devices in arguments.devices:
        options = ["--here", "--steps", str(arguments.steps), "--devices", str(devices)]
        child = subprocess.run([sys.executable, __file__, *options], env=environment, check=False)
        if child.returncode:
            failed += 1
            print(f"{devices} devices: did not finish, exit status {child.returncode}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
