"""What state costs each device, by `sharding`, beside what ZeRO's formula says.

    KERAS_BACKEND=torch python benchmarks/memory.py [--units 512] [--replicas 1 2 4]

On the backend that `KERAS_BACKEND` says; on JAX without it. On PyTorch each replica is a worker.
Parameters and the optimizer's variables are measured: the bytes of the arrays that the first device
holds after a step of `fit`. Gradients are no arrays that outlive a step; that of them, activations
and gathered weights together is, on JAX, what XLA has allotted for temporary values in the compiled
step; on PyTorch by how much more than its state the process of the chief has grown at most, which
says something for large models alone (`--units 4096`).
Exits with 1 if parameters or optimizer take more than 1.1 of the formula.
"""

import argparse
import os
import resource
import sys
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "jax")

import keras
import numpy as np

import kerasdist as kd
from kerasdist.training.binding import require_trainer

LIMIT = 1.1
SHARDINGS = (None, "optimizer", "full")
ROW = "{:10} {:>8} {:>12} {:>12} {:>12} {:>12} {:>12} {:>7}"


def trained(strategy, units):
    """The trained model, and a batch."""
    with strategy.scope():
        layers = [keras.layers.Dense(units, activation="relu") for _ in range(4)]
        model = keras.Sequential([keras.Input((units,)), *layers])
        model.compile(keras.optimizers.Adam(), "mse")
    x = np.random.default_rng(0).normal(size=(32, units)).astype("float32")
    model.fit(x, x, batch_size=16, verbose=0)  # type: ignore[arg-type]
    return model, x[:16]


def held(variables):
    """The bytes on the first device that holds a part of each."""
    if keras.backend.backend() == "torch":
        return sum(one._value.nbytes for one in variables)
    return sum(one._value.addressable_data(0).nbytes for one in variables)


def temporary(model, batch):
    """What XLA has allotted on a device, beside the state, in the compiled step."""
    from kerasdist.backends.jax.fit.steps import StepFunction

    names = ("trainable", "non_trainable", "optimizer", "metrics")
    state = model._get_jax_state(**{f"{name}_variables": True for name in names})
    step = StepFunction(model, model.train_step, require_trainer(model).replicas.arrays)
    data = (batch, batch, None)
    compiled = step.program(state, data).lower(state, data).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def of_strategy(strategy, units):
    """How many weights a model has; the bytes of its weights, its optimizer, temporary values."""
    before = resident()
    model, batch = trained(strategy, units)
    found = held(model.weights), held(model.optimizer.variables)
    if keras.backend.backend() == "jax":
        temp = temporary(model, batch)
    else:
        is_torch = keras.backend.backend() == "torch"
        temp = most_resident() - before - sum(found) if is_torch else "unknown"
    return model.count_params(), *found, temp


def of_workers(replicas, sharding, units):
    """The same of the chief of so many workers."""

    def measured():
        devices = ["cpu:0"]
        if replicas == 1:
            return of_strategy(kd.OneDeviceStrategy(devices[0]), units)
        return of_strategy(
            kd.MultiWorkerMirroredStrategy(devices=devices, sharding=sharding), units
        )

    return kd.launch(measured, workers=replicas)


def resident():
    """How much memory this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def most_resident():
    """How much memory this process has had at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def formula(elements, replicas, sharding):
    """Bytes of parameters and of Adam's two slots, of a model in float32 (ZeRO, section 5)."""
    weights = 4 * elements / (replicas if sharding == "full" else 1)
    return weights, 8 * elements / (replicas if sharding else 1)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--units", type=int, default=512, help="width of four Dense layers")
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2, 4])
    arguments = parser.parse_args()
    on_workers = keras.backend.backend() == "torch"
    if not on_workers:
        kd.config.set_logical_cpu_devices(max(arguments.replicas))
    head = ("sharding", "replicas", "parameters", "formula", "optimizer", "formula", "temporary")
    print(f"on {keras.backend.backend()}\n{ROW.format(*head, 'ratio')}")
    worst = 0.0
    for replicas in arguments.replicas:
        devices = [f"cpu:{index}" for index in range(replicas)]
        for sharding in SHARDINGS:
            try:
                measured = (
                    of_workers(replicas, sharding, arguments.units)
                    if on_workers
                    else of_strategy(
                        kd.MirroredStrategy(devices, sharding=sharding), arguments.units
                    )
                )
            except kd.errors.UnsupportedError:
                continue  # what the backend does not divide
            elements, *found, temp = measured
            expected = formula(elements, replicas, sharding)
            ratio = max(one / other for one, other in zip(found, expected, strict=True))
            worst = max(worst, ratio)
            pairs = [n for pair in zip(found, expected, strict=True) for n in map(round, pair)]
            print(ROW.format(str(sharding), replicas, *pairs, temp, f"{ratio:.3f}"), flush=True)
    sys.exit(0 if worst <= LIMIT else f"more than {LIMIT} of the formula")


if __name__ == "__main__":
    main()
