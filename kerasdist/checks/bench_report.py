"""Shows how training scales: as a table, as JSON, or as a picture."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

from rich.console import Console
from rich.table import Table

from kerasdist.checks.links import Reference
from kerasdist.job.results import AllReduce
from kerasdist.plan.report import milliseconds, size


@final
@dataclass(frozen=True)
class Row:
    """The measurement with one number of workers.

    Attributes:
        workers: How many.
        measured: What `kerasdist.callbacks.telemetry.Bench` tells; None: the job failed.
        failure: Why it failed.
    """

    workers: int
    measured: Mapping[str, Any] | None
    failure: str | None = None

    @property
    def replicas(self) -> int:
        """How many replicas there were."""
        assert self.measured is not None
        return self.measured["replicas"]

    @property
    def step(self) -> float:
        """Seconds of a step."""
        assert self.measured is not None
        return self.measured["seconds"] / max(1, self.measured["steps"])

    @property
    def rate(self) -> float:
        """Examples per second; steps per second if the size of a batch is not known."""
        assert self.measured is not None
        return (self.measured["batch"] or 1) / self.step

    @property
    def bus_bandwidth(self) -> float | None:
        """Bytes a second that each replica sends in an all-reduce of the gradients."""
        assert self.measured is not None
        found = self.measured["all_reduce"]
        return None if found is None else AllReduce(**found).bus_bandwidth


@final
@dataclass(frozen=True)
class Scaling:
    """A benchmark.

    Attributes:
        script: What was trained.
        backend: On which backend.
        rows: By the number of workers.
        reference: What the links allow; None if not known.
    """

    script: str
    backend: str
    rows: Sequence[Row]
    reference: Reference | None

    @property
    def measured(self) -> list[Row]:
        """The rows of jobs that did not fail."""
        return [row for row in self.rows if row.measured is not None]

    def efficiency(self, row: Row) -> float:
        """Returns a replica's rate against that of the smallest number of workers."""
        first = self.measured[0]
        return row.rate / row.replicas / (first.rate / first.replicas)

    def of_links(self, row: Row) -> float | None:
        """Returns an all-reduce's bandwidth, as a part of what the links allow."""
        if self.reference is None or row.bus_bandwidth is None:
            return None
        return row.bus_bandwidth / self.reference.rate


def show(scaling: Scaling, console: Console | None = None) -> None:
    """Prints the table for people."""
    console = console or Console()
    rows = scaling.measured
    has_batch = all(row.measured and row.measured["batch"] for row in rows)
    table = Table(title=f"{scaling.script} on {scaling.backend}", title_justify="left")
    rate = "examples/s" if has_batch else "steps/s"
    several = any(row.replicas != row.workers for row in rows)
    replicas = ("replicas",) if several else ()
    headings = ("workers", *replicas, "step", rate, "efficiency", "all-reduce", "of links")
    for heading in headings:
        table.add_column(heading, justify="right")
    for row in rows:
        bandwidth, part = row.bus_bandwidth, scaling.of_links(row)
        table.add_row(
            str(row.workers),
            *((str(row.replicas),) if several else ()),
            milliseconds(row.step),
            f"{row.rate:,.0f}" if has_batch else f"{row.rate:,.1f}",
            f"{scaling.efficiency(row):.0%}",
            "-" if bandwidth is None else f"{size(bandwidth)}/s",
            "-" if part is None else f"{part:.0%}",
        )
    if rows:
        console.print(table)
    for text in _notes(scaling):
        console.print(text, markup=False, highlight=False)
    for row in scaling.rows:
        if row.failure is not None:
            text = f"{row.workers} workers failed: {row.failure}"
            console.print(text, style="bold red", markup=False)


def _notes(scaling: Scaling) -> list[str]:
    rows = scaling.measured
    notes: list[str] = []
    batches = [row.measured["batch"] for row in rows if row.measured and row.measured["batch"]]
    if batches:
        notes.append(f"batch: {', '.join(f'{batch:,}' for batch in batches)} examples.")
    if any(row.bus_bandwidth for row in rows):
        notes.append(
            "all-reduce: what each replica sends in a second while the gradients are summed, with "
            "nothing else to do."
        )
        reference = scaling.reference
        notes.append(
            "of links: no reference, as the links are not known."
            if reference is None
            else f"of links: against {size(reference.rate)}/s ({reference.source})."
        )
    if any(row.measured and row.measured["with_compilation"] for row in rows):
        notes.append(
            "The script trains a single epoch, so the time to trace and compile counts too. Let it "
            "train two."
        )
    if len(batches) > 1 and len(set(batches)) == 1:
        notes.append(
            "The global batch is the same for all, so that each replica has less to do: strong "
            "scaling. Multiply it by strategy.num_replicas_in_sync for weak scaling."
        )
    if rows and rows[0].measured and rows[0].measured["device"].startswith("cpu"):
        notes.append("Each worker has an equal part of the cores, also where there are fewer.")
    return notes


def as_json(scaling: Scaling) -> str:
    """Returns the benchmark as JSON; sizes in bytes, times in seconds."""
    rows: list[dict[str, Any]] = []
    for row in scaling.rows:
        if row.measured is None:
            rows.append({"workers": row.workers, "failure": row.failure})
            continue
        rows.append(
            {
                **row.measured,
                "step": row.step,
                "rate": row.rate,
                "efficiency": scaling.efficiency(row),
                "bus_bandwidth": row.bus_bandwidth,
                "of_links": scaling.of_links(row),
            }
        )
    facts = {
        "script": scaling.script,
        "backend": scaling.backend,
        "reference": None if scaling.reference is None else asdict(scaling.reference),
        "rows": rows,
    }
    return json.dumps(facts, indent=2)


def plot(scaling: Scaling, path: Path) -> None:
    """Draws the throughput by the number of replicas, beside a line of perfect scaling."""
    from matplotlib.figure import Figure

    rows = scaling.measured
    counts = [row.replicas for row in rows]
    rates = [row.rate for row in rows]
    figure: Any = Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.subplots()
    ideal = [rates[0] / counts[0] * count for count in counts]
    axes.plot(counts, ideal, "--", color="0.6", label="perfect scaling")
    axes.plot(counts, rates, "o-", color="tab:blue", label="measured")
    for row in rows:
        text = f"{scaling.efficiency(row):.0%}"
        place = (row.replicas, row.rate)
        axes.annotate(text, place, (0, -14), textcoords="offset points", ha="center", fontsize=8)
    axes.set_xticks(counts, [f"{count:,}" for count in counts])
    axes.set_ylim(bottom=0)
    axes.margins(x=0.1)
    axes.set_xlabel("replicas")
    axes.set_ylabel("examples a second")
    axes.set_title(f"{scaling.script} on {scaling.backend}: throughput and efficiency")
    axes.legend(loc="upper left")
    figure.savefig(path, dpi=100)
