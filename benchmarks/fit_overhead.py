"""The time of a step of `fit`: under a strategy, in plain Keras, and in hand-written loops.

    python benchmarks/fit_overhead.py [--backends jax torch] [--tasks tiny] [--rounds 5]

"keras's own" is `tf.distribute.MirroredStrategy` on TensorFlow, and
`keras.distribution.DataParallel` on JAX. On JAX "by hand" is a loop with `shard_map`. Keras 3.15
has no distribution on PyTorch. There "2 workers" are two workers of kerasdist, and "by hand" is a
loop in two processes with `DistributedDataParallel`; both are the contenders of multiworker.py.

Every contender runs in a process of its own, on the same cores; the two contenders of two workers
have two processes each. The contenders take turns: one epoch each, round after round (see
alternating.py). Keras's DataParallel on several CPU devices sometimes aborts, so the table says
how often a contender has crashed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys

from alternating import Contender, Team, measure, median, serve, shown_ratio
from multiworker import team
from networks import TASKS
from rich.console import Console
from rich.table import Table

PLAIN, ONE_DEVICE, MIRRORED = "plain", "one device", "mirrored"
KERASS_OWN, BY_HAND = "keras's own", "by hand"
OURS = (PLAIN, ONE_DEVICE, MIRRORED)
CONTENDERS = {"tensorflow": (*OURS, KERASS_OWN), "jax": (*OURS, KERASS_OWN, BY_HAND), "torch": OURS}
# On PyTorch, contenders of two processes, each with the function of loops/ that it runs.
TEAMS = {
    "tensorflow": {},
    "jax": {},
    "torch": {"2 workers": "with_kerasdist.fit", BY_HAND: "with_torch.keras_module"},
}
REFERENCES = (PLAIN, KERASS_OWN, BY_HAND)
REPLICAS = 2
DEVICES = [f"cpu:{index}" for index in range(REPLICAS)]


def _fit_function(backend: str, name: str, contender: str):
    """In the child: an epoch of training."""
    task = TASKS[name]
    if contender == BY_HAND:
        from loops.with_jax import on_devices

        return on_devices(task, REPLICAS)
    x, y = task.data()
    with scope(backend, contender):
        model = task.model()
        model.compile("adam", task.loss())
    return lambda: model.fit(x, y, batch_size=task.batch, epochs=1, shuffle=False, verbose=0)


def scope(backend: str, contender: str):
    """Returns the scope in which a contender makes its model."""
    if contender == PLAIN:
        return contextlib.nullcontext()
    import kerasdist as kd

    if contender == ONE_DEVICE:
        return kd.OneDeviceStrategy("cpu:0").scope()
    kd.config.set_logical_cpu_devices(REPLICAS)
    if contender == MIRRORED:
        return kd.MirroredStrategy(DEVICES).scope()
    if backend == "tensorflow":
        import tensorflow as tf

        return tf.distribute.MirroredStrategy(DEVICES).scope()
    import keras

    keras.distribution.set_distribution(keras.distribution.DataParallel(devices=DEVICES))
    return contextlib.nullcontext()


def contenders_of(backend: str, task: str) -> dict[str, Contender | Team]:
    """Starts the contenders, by name."""
    alone = {name: Contender(__file__, backend, task, name) for name in CONTENDERS[backend]}
    return {**alone, **{name: team(backend, task, loop) for name, loop in TEAMS[backend].items()}}


def main() -> None:
    """Prints one table a backend."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backends", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--rounds", type=int, default=5, help="counted epochs of each (at least 5)")
    options = parser.parse_args()
    console = Console(width=110)
    for backend in options.backends:
        cores = os.cpu_count()
        table = Table(title=f"{backend}: a step of fit, {REPLICAS} replicas on {cores} cores")
        table.add_column("task")
        table.add_column("contender")
        for column in ("ms a step", "samples/s", *(f"time ÷ {name}" for name in REFERENCES)):
            table.add_column(column, justify="right")
        for name in options.tasks:
            task = TASKS[name]
            figures = measure(contenders_of(backend, name), options.rounds)
            references = [figures.get(reference) for reference in REFERENCES]
            for contender, values in figures.items():
                step = median(values) / task.steps
                table.add_row(
                    name,
                    contender,
                    f"{step * 1e3:.3f}",
                    f"{task.batch / step:,.0f}",
                    *(shown_ratio(values, one) for one in references),
                )
        console.print(table)


if __name__ == "__main__":
    if len(sys.argv) == 5 and sys.argv[1] == "--child":
        serve(lambda: _fit_function(*sys.argv[2:]))
    else:
        main()
