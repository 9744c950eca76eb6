"""``kerasdist bench`` runs a script with several numbers of workers and shows how it scales."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, final

import typer
from rich.console import Console

from kerasdist.cli.diagnostics import jobs
from kerasdist.cli.diagnostics.machine import gpu_links
from kerasdist.cli.formatting import (
    annotate,
    figure,
    milliseconds,
    plain_console,
    require_matplotlib,
    table,
)
from kerasdist.cli.launch import supervisor
from kerasdist.cli.launch.placement import place, with_workers
from kerasdist.cli.launch.spec import JobSpec, python_command
from kerasdist.cli.options import Arguments, AsJson, Hosts, Plot, Seconds, listed, option
from kerasdist.core import gpus
from kerasdist.core.backend_choice import backend_choice
from kerasdist.core.hardware import chip_of
from kerasdist.core.sharding import size
from kerasdist.errors import JobError
from kerasdist.job.launcher import BENCH, AllReduce

_WORKER = "kerasdist.cli.diagnostics.bench_worker"
_MOST_ON_CPU = 8
_NO_FIT = "there was no fit of a model that was made in the scope of a strategy"


@final
@dataclass(frozen=True)
class Reference:
    """The best rate that an all-reduce could reach.

    Attributes:
        rate: How many bytes a device can send in a second.
        source: A text that names the links or the network with this rate.
    """

    rate: float
    source: str


@final
@dataclass(frozen=True)
class Row:
    """The measurement with a certain number of workers.

    Attributes:
        workers: The number of workers.
        measured: The result of `kerasdist.callbacks.telemetry.Bench`; empty if the job failed.
        failure: Why the job failed; None if it succeeded.
    """

    workers: int
    measured: Mapping[str, Any]
    failure: str | None = None

    @property
    def replicas(self) -> int:
        """How many replicas all workers had together."""
        return self.measured["replicas"]

    @property
    def step(self) -> float:
        """Seconds that a step took."""
        return self.measured["seconds"] / max(1, self.measured["steps"])

    @property
    def rate(self) -> float:
        """Examples per second, or steps per second if the size of a batch is not known."""
        return (self.measured["batch"] or 1) / self.step

    @property
    def bus_bandwidth(self) -> float | None:
        """Bytes a second that each replica sends in an all-reduce of the gradients."""
        found = self.measured["all_reduce"]
        return None if found is None else AllReduce(**found).bus_bandwidth


@final
@dataclass(frozen=True)
class Scaling:
    """The measurements of one script with several numbers of workers.

    Attributes:
        script: The script that was trained.
        backend: The backend on which it was trained.
        rows: The measurements, in the order of the numbers of workers.
        reference: The best rate of the links; None if that is not known.
    """

    script: str
    backend: str
    rows: Sequence[Row]
    reference: Reference | None

    @property
    def measured(self) -> list[Row]:
        """The rows of jobs that did not fail."""
        return [row for row in self.rows if row.measured]

    def efficiency(self, row: Row) -> float:
        """Returns the efficiency in a row, relative to the smallest number of workers.

        It is a replica's rate, divided by a replica's rate in the first row of `measured`.
        """
        first = self.measured[0]
        return row.rate / row.replicas / (first.rate / first.replicas)

    def of_links(self, row: Row) -> float | None:
        """Returns the bandwidth of an all-reduce, as a fraction of the best rate of the links.

        The result is None if the bandwidth or the rate is not known.
        """
        if self.reference is None or row.bus_bandwidth is None:
            return None
        return row.bus_bandwidth / self.reference.rate


def bench(
    script: Annotated[
        str | None,
        typer.Argument(metavar="SCRIPT", help="A script (default: a model of kerasdist's own)."),
    ] = None,
    arguments: Arguments = None,
    *,
    backend: Annotated[
        str | None, option("NAME", "tensorflow, jax or torch (default: Keras's choice).")
    ] = None,
    workers: Annotated[
        str | None,
        option(
            "N,N,...",
            "Numbers of workers (default: 1, 2, 4, ... up to the GPUs, slots or 8 cores).",
            "--workers",
            "-n",
        ),
    ] = None,
    hosts: Hosts = None,
    timeout: Seconds = 900.0,
    as_json: AsJson = False,
    plot: Plot = None,
) -> None:
    """Measure how training scales on this machine, or on --hosts.

    The script, or a model of kerasdist's own, is trained by 1, 2, ... workers. The command shows
    the throughput of training, and the bandwidth between the replicas relative to what the links
    allow. The script needs no changes. The longest of its calls of fit is measured.
    """
    if plot is not None:
        require_matplotlib()
    counts = _numbers(workers) or _doubled(_most(hosts))
    backend = backend or backend_choice().name
    jobs.require_backend(backend)
    command = python_command(_WORKER, module=True)
    if script is not None:
        command = python_command(script, arguments or ())
    on_cpus = jobs.cpu_variables(hosts)
    if on_cpus and sys.platform == "linux":
        cores = max(1, supervisor.cores() // max(counts))
        command = python_command(_WORKER, [str(cores), *command], module=True)
    spec = JobSpec(command, hosts=listed(hosts), environment={**on_cpus, BENCH: "1"})
    rows = [_measure(spec, backend, count, timeout) for count in counts]
    found = None if on_cpus else reference(is_one_machine=not hosts)
    scaling = Scaling(script or "kerasdist's own model", backend, rows, found)
    if as_json:
        typer.echo(described(scaling))
    else:
        show(scaling, plain_console())
    if plot is not None and scaling.measured:
        draw(scaling, plot)
        typer.echo(f"[kerasdist] wrote {plot}", err=True)
    raise typer.Exit(len(scaling.measured) < len(rows))


def _numbers(text: str | None) -> tuple[int, ...]:
    words = [] if text is None else text.split(",")
    if not all(word.isdecimal() and int(word) for word in words):
        raise typer.BadParameter(
            f"expected numbers from 1, such as 1,2,4, received {text!r}", param_hint="--workers"
        )
    return tuple(sorted({int(word) for word in words}))


def _most(hosts: str | None) -> int:
    if hosts:
        return len(place(None, listed(hosts)))
    if jobs.has_accelerator():
        return max(1, len(gpus.visible()))
    return min(_MOST_ON_CPU, supervisor.cores())


def _doubled(most: int) -> tuple[int, ...]:
    """Returns the powers of two below a number, and the number itself."""
    return (*(2**power for power in range((most - 1).bit_length())), most)


def _measure(spec: JobSpec, backend: str, count: int, seconds: float) -> Row:
    """Measures training with `count` workers."""
    own = {**spec.environment, **_first_gpus(count)}
    job = with_workers(replace(spec, environment=own), count)
    try:
        results = jobs.run(job, backend, seconds, _NO_FIT)
    except JobError as error:
        return Row(count, {}, str(error))
    # A script may call `fit` several times. The longest call is the best measurement. A call
    # whose time includes compilation is used only if there is no other call.
    return Row(count, max(results, key=lambda x: (not x["with_compilation"], x["seconds"])))


def _first_gpus(count: int) -> dict[str, str]:
    """Returns the environment variable that shows only `count` of the GPUs to the workers.

    So each of `count` workers gets one GPU. Without the variable, the workers would divide all GPUs
    among themselves. If there are no more GPUs than workers, the result is empty.
    """
    variable, names = gpus.offered(os.environ)
    return {variable: ",".join(names[:count])} if 0 < count < len(names) else {}


def reference(*, is_one_machine: bool) -> Reference | None:
    """Returns the rate of the links between GPUs; None if kerasdist does not know it.

    Args:
        is_one_machine: Whether all workers are on this machine.
    """
    found = gpu_links()
    if not found:
        return None
    first, chip = found[0], chip_of(found[0].name)
    if not is_one_machine:
        return None if chip is None else Reference(chip.network_rate, f"network of {chip.title}")
    if first.nvlinks and chip is not None:
        return Reference(chip.link_rate, f"NVLink of {chip.title}")
    if first.nvlinks or first.pcie_rate is None:
        return None
    return Reference(first.pcie_rate, f"PCIe {first.pcie_generation} x{first.pcie_width}")


def show(scaling: Scaling, console: Console) -> None:
    """Prints the measurements as a table with notes, for human readers."""
    rows = scaling.measured
    has_batch = all(row.measured["batch"] for row in rows)
    several = any(row.replicas != row.workers for row in rows)
    headings = ["workers", *(("replicas",) if several else ()), "step"]
    headings += ["examples/s" if has_batch else "steps/s", "efficiency", "all-reduce", "of links"]
    shown = table(f"{scaling.script} on {scaling.backend}", headings)
    for row in rows:
        bandwidth, part = row.bus_bandwidth, scaling.of_links(row)
        shown.add_row(
            str(row.workers),
            *((str(row.replicas),) if several else ()),
            milliseconds(row.step),
            f"{row.rate:,.0f}" if has_batch else f"{row.rate:,.1f}",
            f"{scaling.efficiency(row):.0%}",
            "-" if bandwidth is None else f"{size(bandwidth)}/s",
            "-" if part is None else f"{part:.0%}",
        )
    if rows:
        console.print(shown)
    for text in _notes(scaling):
        console.print(text, highlight=False)
    for row in scaling.rows:
        if row.failure is not None:
            text = f"{row.workers} workers failed: {row.failure}"
            console.print(text, style="bold red")


def _notes(scaling: Scaling) -> list[str]:
    rows = scaling.measured
    notes: list[str] = []
    batches = [row.measured["batch"] for row in rows if row.measured["batch"]]
    if batches:
        notes.append(f"batch: {', '.join(f'{batch:,}' for batch in batches)} examples.")
    if any(row.bus_bandwidth for row in rows):
        notes.append(
            "all-reduce: the bytes that each replica sends in a second while gradients are summed "
            "and nothing else runs."
        )
        known = scaling.reference
        notes.append(
            "of links: no reference, as the links are not known."
            if known is None
            else f"of links: relative to {size(known.rate)}/s ({known.source})."
        )
    if any(row.measured["with_compilation"] for row in rows):
        notes.append(
            "The script trains a single epoch, so the time to trace and compile is included. Let "
            "the script train two epochs."
        )
    if len(batches) > 1 and len(set(batches)) == 1:
        notes.append(
            "The global batch is the same in all rows, so each replica has less to do: strong "
            "scaling. For weak scaling, multiply the batch by strategy.num_replicas_in_sync."
        )
    if rows and rows[0].measured["device"].startswith("cpu"):
        notes.append("Each worker has the same number of cores in all rows of the table.")
    return notes


def described(scaling: Scaling) -> str:
    """Returns the benchmark as JSON. Sizes are in bytes, and times in seconds."""
    rows = [
        {
            **row.measured,
            "step": row.step,
            "rate": row.rate,
            "efficiency": scaling.efficiency(row),
            "bus_bandwidth": row.bus_bandwidth,
            "of_links": scaling.of_links(row),
        }
        if row.measured
        else {"workers": row.workers, "failure": row.failure}
        for row in scaling.rows
    ]
    return json.dumps({**asdict(scaling), "rows": rows}, indent=2)


def draw(scaling: Scaling, path: Path) -> None:
    """Draws the throughput by the number of replicas, next to a line of perfect scaling."""
    rows = scaling.measured
    counts, rates = [row.replicas for row in rows], [row.rate for row in rows]
    title = f"{scaling.script} on {scaling.backend}: throughput and efficiency"
    with figure(path, title, counts, "replicas", "examples a second") as axes:
        ideal = [rates[0] / counts[0] * count for count in counts]
        axes.plot(counts, ideal, "--", color="0.6", label="perfect scaling")
        axes.plot(counts, rates, "o-", color="tab:blue", label="measured")
        annotate(axes, counts, rates, [f"{scaling.efficiency(row):.0%}" for row in rows], -14)
        axes.set_ylim(bottom=0)
