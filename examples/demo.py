"""Train the first example on two replicas on every backend; compare with one device.

`make demo` runs this. A backend is one fresh process, because Keras picks its backend
when it is imported. That process trains the same model twice, from the same weights
and with the same seed: under `kd.MirroredStrategy` and with plain Keras. The process
exits with 1 if the accuracy is too low or the weights differ.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from typing import Any

from rich.console import Console
from rich.table import Table

BACKENDS = ("tensorflow", "jax", "torch")
DEVICES = ("cpu:0", "cpu:1")
MIN_ACCURACY = 0.97
# 516 float32 steps, in which two replicas add in another order than one device. Rounding every
# weight in another way after each step moves the final weights, of up to 5, by about 1e-5.
MAX_DIFFERENCE = 1e-4
TIMEOUT_S = 600
MARK = "kerasdist-demo "  # before the one line of stdout that is the result


def train() -> dict[str, Any]:
    """Train both ways in this process and return the row of the table."""
    import digits_cnn
    import keras
    import numpy as np

    import kerasdist as kd

    strategy = kd.MirroredStrategy(list(DEVICES))
    x_train, x_test, y_train, y_test = digits_cnn.load_data()
    steps = digits_cnn.EPOCHS * -(-len(x_train) // digits_cnn.BATCH_SIZE)

    def fit(model: keras.Model) -> float:
        keras.utils.set_random_seed(1)  # the same order of examples
        start = time.perf_counter()
        model.fit(
            x_train, y_train, batch_size=digits_cnn.BATCH_SIZE, epochs=digits_cnn.EPOCHS, verbose=0
        )
        return time.perf_counter() - start

    keras.utils.set_random_seed(0)
    with strategy.scope():
        mirrored = digits_cnn.build_model(steps)
    initial = mirrored.get_weights()
    seconds = fit(mirrored)
    _, accuracy = mirrored.evaluate(x_test, y_test, batch_size=digits_cnn.BATCH_SIZE, verbose=0)

    plain = digits_cnn.build_model(steps)
    plain.set_weights(initial)
    plain_seconds = fit(plain)

    pairs = zip(mirrored.get_weights(), plain.get_weights(), strict=True)
    return {
        "replicas": strategy.num_replicas_in_sync,
        "accuracy": float(accuracy),
        "seconds": seconds,
        "plain_seconds": plain_seconds,
        "difference": max(float(np.max(np.abs(a - b))) for a, b in pairs),
    }


def run(backend: str) -> tuple[dict[str, Any] | None, str]:
    """Return the row of `backend` from a fresh process, or None, and what it printed."""
    environment = {"TF_CPP_MIN_LOG_LEVEL": "3", **os.environ, "KERAS_BACKEND": backend}
    try:
        child = subprocess.run(
            [sys.executable, __file__, "--train"],
            env=environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None, f"no result after {TIMEOUT_S} s"
    lines = [line for line in child.stdout.splitlines() if line.startswith(MARK)]
    if child.returncode or not lines:
        return None, f"exit status {child.returncode}\n{child.stdout}{child.stderr}"
    return json.loads(lines[-1].removeprefix(MARK)), child.stderr


def is_good(row: dict[str, Any]) -> bool:
    """Tell whether a row keeps both promises (a NaN keeps none)."""
    return row["accuracy"] > MIN_ACCURACY and row["difference"] <= MAX_DIFFERENCE


def main() -> int:
    """Run the backends, print the table, and return the exit status."""
    parser = argparse.ArgumentParser(description="Compare two replicas with one device.")
    parser.add_argument("backends", nargs="*", metavar="BACKEND", help=", ".join(BACKENDS))
    parser.add_argument("--train", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.train:
        print(MARK + json.dumps(train()))
        return 0
    backends = arguments.backends or list(BACKENDS)
    if unknown := set(backends) - set(BACKENDS):
        parser.error(f"expected some of {', '.join(BACKENDS)}. Received: {sorted(unknown)}")

    console = Console()
    table = Table(title="examples/digits_cnn.py under kd.MirroredStrategy")
    table.add_column("backend")
    for name in ("replicas", "test accuracy", "seconds", "one device", "largest difference"):
        table.add_column(name, justify="right")
    failed = []
    for backend in backends:
        console.print(f"training on {backend} ...".ljust(55), end="")
        start = time.perf_counter()
        row, output = run(backend)
        console.print(f"{time.perf_counter() - start:.0f} s")
        if row is None:
            failed.append(backend)
            table.add_row(backend, "failed")
            console.print(f"{backend}: {output}", markup=False, highlight=False)
            continue
        if not is_good(row):
            failed.append(backend)
        table.add_row(
            backend,
            str(row["replicas"]),
            f"{row['accuracy']:.2%}",
            f"{row['seconds']:.1f} s",
            f"{row['plain_seconds']:.1f} s",
            f"{row['difference']:.1e}",
            style=None if is_good(row) else "red",
        )
    console.print(table)
    console.print(
        "Largest difference: of any weight after training, to plain Keras on one device.\n"
        f"Expected: accuracy above {MIN_ACCURACY:.0%}, difference at most {MAX_DIFFERENCE:g}.\n"
        "Two CPU devices share the cores of one machine: this shows equality, not speed."
    )
    if failed:
        console.print(f"Not as expected: {', '.join(failed)}", style="red")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
