"""What the command ``kerasdist bench`` does."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

from kerasdist.checks import bench_report, jobs, links
from kerasdist.checks.bench_report import Row, Scaling
from kerasdist.core import gpus
from kerasdist.core.backend_choice import backend_choice
from kerasdist.errors import BackendError, KerasdistError
from kerasdist.job.results import BENCH
from kerasdist.launch import environment, supervisor
from kerasdist.launch.placement import place
from kerasdist.launch.spec import JobSpec, python_command
from kerasdist.launch.worker_count import with_workers
from kerasdist.plan.report import require_matplotlib

_MODEL, _PINNED = "kerasdist.checks.bench_worker", "kerasdist.checks.pinned"
_METERED = {BENCH: "1"}
_MOST_ON_CPU = 8
_NO_FIT = "there was no fit of a model that was made in the scope of a strategy"
_BATCH = 256


@final
@dataclass(frozen=True)
class BenchOptions:
    """The options of `kerasdist bench`.

    Attributes:
        script: The script; None: kerasdist's own model.
        arguments: The script's arguments.
        backend: The backend; None: Keras's choice.
        workers: Numbers of workers; none: 1, 2, 4, ... up to what there is.
        hosts: As in `JobSpec`.
        batch_per_replica: Examples of a replica, for kerasdist's own model.
        steps: Steps of an epoch, likewise.
        seconds: After how long a job is ended.
        as_json: Whether to print JSON.
        plot: Where to draw the scaling.
    """

    script: str | None = None
    arguments: Sequence[str] = ()
    backend: str | None = None
    workers: Sequence[int] = ()
    hosts: Sequence[str] = ()
    batch_per_replica: int | None = None
    steps: int = 20
    seconds: float = 900.0
    as_json: bool = False
    plot: Path | None = None


def run(options: BenchOptions) -> bool:
    """Measures and prints the scaling. Returns whether every number of workers was measured.

    Raises:
        KerasdistError: If the backend is not there, or workers cannot be placed.
    """
    if options.plot is not None:
        require_matplotlib()
    if options.script is not None and options.batch_per_replica is not None:
        raise KerasdistError(
            "Expected --batch-per-replica without a script, whose batches are its own. Received: "
            f"--batch-per-replica {options.batch_per_replica} and {options.script}. Leave one out."
        )
    backend = options.backend or backend_choice().name
    problem = backend_choice({**os.environ, "KERAS_BACKEND": backend}).problem
    if problem is not None:
        raise BackendError(problem)
    bench = _Bench(options, backend)
    rows = [bench.row(count) for count in bench.counts]
    measured = [row for row in rows if row.measured is not None]
    scaling = Scaling(options.script or "kerasdist's own model", backend, rows, bench.reference())
    if options.as_json:
        sys.stdout.write(bench_report.as_json(scaling) + "\n")
    else:
        bench_report.show(scaling)
    if options.plot is not None and measured:
        bench_report.plot(scaling, options.plot)
        sys.stderr.write(f"[kerasdist] wrote {options.plot}\n")
    return len(measured) == len(rows)


@final
class _Bench:
    """The jobs of a benchmark."""

    def __init__(self, options: BenchOptions, backend: str) -> None:
        self._options = options
        self._backend = backend
        self._where = jobs.Place(hosts=options.hosts, seconds=options.seconds)
        self.counts = options.workers or _doubled(self._most())

    def _most(self) -> int:
        if self._options.hosts:
            return len(place(None, self._options.hosts))
        if jobs.has_accelerator():
            return max(1, len(gpus.visible()))
        return min(_MOST_ON_CPU, supervisor.cores())

    def row(self, count: int) -> Row:
        """Measures training with so many workers."""
        ran = jobs.run(self._spec(count), self._backend, self._options.seconds, _NO_FIT)
        if ran.failure is None:
            # A script may call `fit` several times. The longest one is the best measurement, if
            # possible of those that do not include the time to compile.
            best = max(ran.results, key=lambda one: (not one["with_compilation"], one["seconds"]))
            return Row(count, best)
        return Row(count, None, f"{ran.failure}; the workers' output is in {ran.logs}")

    def reference(self) -> links.Reference | None:
        """Returns the limit that the links set between the devices of all workers."""
        device = "cpu:0" if self._where.is_on_cpu else "gpu:0"
        return links.reference(device, is_one_machine=not self._options.hosts)

    def _spec(self, count: int) -> JobSpec:
        options = self._options
        if options.script is None:
            batch = options.batch_per_replica or _BATCH
            command = python_command(_MODEL, [str(batch), str(options.steps)], module=True)
        else:
            command = python_command(options.script, options.arguments)
        if self._where.is_on_cpu and sys.platform == "linux":
            cores = max(1, supervisor.cores() // max(self.counts))
            command = python_command(_PINNED, [str(cores), *command], module=True)
        spec = self._where.spec(command, {**_METERED, **_first_gpus(count)})
        return with_workers(replace(spec, workers=count), count)


def _first_gpus(count: int) -> dict[str, str]:
    """Returns the variable that shows `count` GPUs to the workers of a machine.

    Each then has one; otherwise fewer workers would have more of them each.
    """
    variable, names = environment.offered_gpus(os.environ)
    return {variable: ",".join(names[:count])} if 0 < count < len(names) else {}


def _doubled(most: int) -> tuple[int, ...]:
    counts: list[int] = []
    while (count := 1 << len(counts)) < most:
        counts.append(count)
    return (*counts, most)
