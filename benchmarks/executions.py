"""What `steps_per_execution` saves in `fit` on JAX, under a strategy and in plain Keras.

With 16 steps per execution, kerasdist compiles one program for all of them. So does plain Keras
from 3.16 on; earlier versions run the steps one by one. `--beside FOLDER` adds plain Keras of
another version, which must be unpacked in this folder. In the table, "time ÷ its single steps" is
the time per step, divided by the time per step of the same contender with one step per execution.

    python benchmarks/executions.py [--tasks tiny mlp] [--rounds 7] [--beside FOLDER]

Every contender runs in a process of its own, on the same cores. The contenders take turns: one
epoch each, round after round (see alternating.py).
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import re
import sys
from pathlib import Path

from alternating import Contender, measure, median, ratio, serve
from fit_overhead import MIRRORED, ONE_DEVICE, PLAIN, REPLICAS, scope
from networks import TASKS
from rich.console import Console
from rich.table import Table

BACKEND = "jax"
STEPS = (1, 16)


def fit_function(name: str, contender: str, steps: str):
    """In the child: an epoch of training."""
    task = TASKS[name]
    x, y = task.data()
    with scope(BACKEND, contender):
        model = task.model()
        model.compile("adam", task.loss(), steps_per_execution=int(steps))
    return lambda: model.fit(x, y, batch_size=task.batch, epochs=1, shuffle=False, verbose=0)


def contenders_of(task: str, beside: str | None) -> dict[tuple[str, int], Contender]:
    """Starts the contenders, by name and number of steps in an execution."""
    kinds = {
        f"plain {importlib.metadata.version('keras')}": (PLAIN, {}),
        "kerasdist, one device": (ONE_DEVICE, {}),
        f"kerasdist, {REPLICAS} devices": (MIRRORED, {}),
    }
    if beside is not None:
        text = Path(beside, "keras", "src", "version.py").read_text("utf-8")
        [version] = re.findall(r'__version__ = "(.*)"', text)
        version = re.sub(r"(?<=dev)\d+", "", version)  # the day of a nightly
        kinds[f"plain {version}"] = PLAIN, {"PYTHONPATH": beside}
    return {
        (name, steps): Contender(
            __file__, BACKEND, task, contender, str(steps), environment=environment
        )
        for name, (contender, environment) in kinds.items()
        for steps in STEPS
    }


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backends", nargs="+", choices=[BACKEND], default=[BACKEND])
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=["tiny", "mlp"])
    parser.add_argument("--rounds", type=int, default=7, help="counted epochs of each (at least 5)")
    parser.add_argument("--beside", metavar="FOLDER", help="where another version of Keras lies")
    options = parser.parse_args()
    console = Console(width=110)
    table = Table(title=f"{BACKEND}: steps of fit in an execution, on {os.cpu_count()} cores")
    for column in ("task", "contender"):
        table.add_column(column)
    for column in ("steps", "ms a step", "time ÷ its single steps"):
        table.add_column(column, justify="right")
    for name in options.tasks:
        figures = measure(contenders_of(name, options.beside), options.rounds)
        for (contender, steps), values in figures.items():
            saved = ratio(values, figures[contender, 1])
            step = f"{median(values) / TASKS[name].steps * 1e3:.3f}"
            table.add_row(name, contender, str(steps), step, f"{saved:.2f}")
    console.print(table)


if __name__ == "__main__":
    if len(sys.argv) == 6 and sys.argv[1] == "--child":
        serve(lambda: fit_function(*sys.argv[3:]))
    else:
        main()
