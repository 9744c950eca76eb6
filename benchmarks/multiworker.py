"""Samples per second of two workers with one thread each, and of hand-written loops.

    python benchmarks/multiworker.py [--backends jax torch] [--tasks mlp] [--rounds 5]
    python benchmarks/multiworker.py --sharding full --backends torch --tasks mlp

Every contender is two processes that train together. The contenders take turns, one round each, so
that other work of the machine slows all of them equally (see alternating.py). All settings have
their defaults, except `OMP_NUM_THREADS`, which is 1, as `kerasdist run` and torchrun set it for two
workers on two cores. "by hand" is a loop that is written with the framework's own tools and trains
the same Keras model. The loops are in loops/, and the models in networks.py.

On PyTorch "by hand" is DistributedDataParallel (DDP) around the Keras model, with PyTorch's loss
and optimizer and without metrics. "Keras's optimizer" is the same loop with Keras's optimizer.
"plain torch" is DDP around an equal PyTorch module, without Keras. "Keras's own fit" is `fit` of
Keras's nightly, which wraps the model in DDP if the user has created the process group. "fit, a
callback" is `fit` of kerasdist with a callback that does not read the logs of a step; the callback
of "fit, logs read" reads the logs of each step. "fit, per_replica" is `fit` of kerasdist with
`batch_norm="per_replica"`. "MB" is the peak of a worker's memory. A step of `fit` sends one message
for each bucket of gradients (one bucket for tiny, two for the other models), two messages for each
of the CNN's nine BatchNormalization layers, and one message for metrics of `compile` if a callback
gets the logs of a step. The mean of the loss goes with the last bucket.
docs/adr/0115-as-fast-as-ddp.md says what the time of a step is spent on. "~" marks a ratio that
differs between rounds by more than 15 %.
"""

from __future__ import annotations

import argparse
import importlib
import os
import socket
import sys
from pathlib import Path

from alternating import Contender, Team, measure, median, serve, shown_ratio
from loops import Place
from networks import TASKS
from rich.console import Console
from rich.table import Table

WORKERS = 2
BY_HAND = "by hand"
PLAIN_TORCH = "plain torch"
KERAS = "Keras's own fit"
NIGHTLIES = Path(__file__).parents[1] / ".venv" / "keras-nightly"  # `make nightly` fills it
FIT, LOOP = "kerasdist fit", "kerasdist loop"
OURS = {FIT: "with_kerasdist.fit", LOOP: "with_kerasdist.loop"}
# Batch normalization as the loops by hand have it; on JAX `fit` has no such choice.
PER_REPLICA = {"fit, per_replica": "with_kerasdist.fit_per_replica"}
NORMALIZED = ("cnn",)
# What a callback of the user costs, which is most where a step is all overhead.
WITH_CALLBACKS = {
    "fit, a callback": "with_kerasdist.fit_with_callback",
    "fit, logs read": "with_kerasdist.fit_with_logs_read",
}
CONTENDERS = {
    "tensorflow": {**OURS, BY_HAND: "with_tensorflow.keras_model"},
    "jax": {**OURS, BY_HAND: "with_jax.keras_model"},
    "torch": {
        **OURS,
        BY_HAND: "with_torch.keras_module",
        KERAS: "with_torch.keras_fit",
        "Keras's optimizer": "with_torch.keras_optimizer",
        PLAIN_TORCH: "with_torch.plain_module",
    },
}

# With sharded state, by the argument `sharding` of the strategy.
SHARDED = {
    "optimizer": {
        "torch": {
            FIT: "with_kerasdist.fit_sharded_optimizer",
            BY_HAND: "with_torch.sharded_optimizer",
        }
    },
    "full": {
        "torch": {
            FIT: "with_kerasdist.fit_fully_sharded",
            BY_HAND: "with_torch.sharded_keras_module",
            PLAIN_TORCH: "with_torch.sharded_plain_module",
        }
    },
}


def _free_ports(number: int) -> list[int]:
    probes = [socket.create_server(("localhost", 0)) for _ in range(number)]
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


def team(backend: str, task: str, loop: str) -> Team:
    """Starts the workers of a contender, which run a function of loops/."""
    meeting, *ports = _free_ports(1 + WORKERS)
    common = {
        "BENCHMARK_PORTS": ",".join(map(str, ports)),
        "KERASDIST_COORDINATOR": f"localhost:{meeting}",
        "KERASDIST_WORKERS": str(WORKERS),
        "KERASDIST_LOCAL_WORKERS": str(WORKERS),
        "OMP_NUM_THREADS": "1",
        **(
            {"PYTHONPATH": str(max(NIGHTLIES.iterdir()))}
            if loop == CONTENDERS["torch"][KERAS]
            else {}
        ),
    }
    return Team(
        [
            Contender(
                __file__,
                backend,
                task,
                loop,
                environment={
                    **common,
                    "KERASDIST_RANK": str(rank),
                    "KERASDIST_LOCAL_RANK": str(rank),
                },
            )
            for rank in range(WORKERS)
        ]
    )


def _work(task: str, loop: str):
    """In the child: the loop."""
    place = Place.of_environment()
    module, _, function = loop.partition(".")
    return getattr(importlib.import_module(f"loops.{module}"), function)(TASKS[task], place)


def contenders_of(backend: str, task: str, sharding: str | None = None) -> dict[str, Team]:
    """Starts the contenders, by name."""
    if sharding is not None:
        loops = SHARDED[sharding][backend]
    else:
        loops = dict(CONTENDERS[backend])
        if task in NORMALIZED and backend != "jax":
            loops = {**PER_REPLICA, **loops}
        if task == "tiny" and backend == "torch":
            loops = {**WITH_CALLBACKS, **loops}
        if KERAS in loops and not NIGHTLIES.exists():
            print(f"{KERAS}: no Keras nightly in {NIGHTLIES}; `make nightly` installs it")
            del loops[KERAS]
    return {label: team(backend, task, loop) for label, loop in loops.items()}


def main() -> None:
    """Prints one table a backend."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backends", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--rounds", type=int, default=5, help="counted rounds of each (at least 5)")
    parser.add_argument("--sharding", choices=SHARDED, help="let the workers divide state")
    options = parser.parse_args()
    console = Console(width=110)
    for backend in options.backends:
        table = Table(title=f"{backend}: {WORKERS} workers of one thread, {os.cpu_count()} cores")
        table.add_column("task")
        table.add_column("contender")
        for column in ("ms a step", "samples/s", "MB", f"speed ÷ {BY_HAND}", f"÷ {PLAIN_TORCH}"):
            table.add_column(column, justify="right")
        for name in options.tasks:
            task = TASKS[name]
            contenders = contenders_of(backend, name, options.sharding)
            figures = measure(contenders, options.rounds)
            for label, seconds in figures.items():
                step = median(seconds) / task.steps
                # Ratios are of speeds, so the reference's seconds are above.
                table.add_row(
                    name,
                    label,
                    f"{step * 1e3:.3f}",
                    f"{task.batch / step:,.1f}",
                    f"{contenders[label].peak:,}",
                    shown_ratio(figures[BY_HAND], seconds),
                    shown_ratio(figures.get(PLAIN_TORCH), seconds),
                )
        console.print(table)


if __name__ == "__main__":
    if len(sys.argv) == 5 and sys.argv[1] == "--child":
        serve(lambda: _work(*sys.argv[3:]))
    else:
        main()
