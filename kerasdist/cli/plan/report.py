"""Prints a plan: as tables, as JSON, or as a picture."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from rich.console import Console

from kerasdist.cli.formatting import annotate, figure, milliseconds, table
from kerasdist.cli.plan.hlo import Collective
from kerasdist.cli.plan.planning import LargestBatch, Plan, StepTime, Subject
from kerasdist.core.sharding import scaled, size

_ROWS = 12  # the table of variables has at most this many rows
_LIMITS = {
    "compute": "the matrix units",
    "memory": "the rate of the memory",
    "instructions": "the number of short instructions",
    "network": "the network",
    "host": "the way to the host's memory",
}


def show(plan: Plan, console: Console) -> None:
    """Prints a plan as sentences and tables for human readers."""
    target, subject, each = plan.target, plan.subject, plan.compiled.batch
    made = f"under {subject.strategy}" if subject.strategy else "without a strategy"
    if subject.sharding:
        made += f" with sharding={subject.sharding!r}"
    console.print(
        f"{subject.script} on {target.devices} x {target.chip.title} ({target}), planned on JAX; "
        f"the model was made {made}, and has {subject.parameters:,} parameters. {each:,} examples "
        f"a device, {each * target.devices:,} in a step."
    )
    _show_memory(plan, console)
    if subject.sharding and subject.layout is not None:
        console.print(subject.layout.table(_ROWS))
    if plan.compiled.refused is None:
        _show_work(plan, console)
        _show_torch(plan, console)
        _show_scaling(plan, console)
    for source in _sources(plan):
        console.print(source, style="dim", highlight=False)


def _show_memory(plan: Plan, console: Console) -> None:
    need, have = plan.compiled.total, plan.target.usable
    verdict = "It fits" if plan.fits else "It does not fit"
    verdict += f": {size(need)} of {size(have)} a device."
    console.print(verdict, style="bold green" if plan.fits else "bold red")
    if plan.largest_batch is not None:
        console.print(_largest(plan.largest_batch, plan.subject))
    shown = table("Memory of a device", ("kind", "bytes"), left=1)
    for kind, value in plan.compiled.memory.items():
        shown.add_row(kind, size(value))
    console.print(shown)
    if plan.compiled.work.host_bytes:
        console.print(
            f"The host holds {size(plan.compiled.work.host_bytes)} for each device, "
            f"{size(plan.compiled.work.host_bytes * _devices_of_host(plan))} in all for the "
            "devices of a machine or slice. Each step copies these bytes to the device and back, "
            f"which takes at least {milliseconds(plan.step.host)}."
        )


def _sources(plan: Plan) -> list[str]:
    chip = plan.target.chip
    return [*chip.sources, *([chip.host_source] if plan.compiled.work.host_bytes else [])]


def _devices_of_host(plan: Plan) -> int:
    return min(plan.target.devices, plan.target.domain)


def _largest(found: LargestBatch, subject: Subject) -> str:
    if found.limit == "memory":
        return f"The largest batch that fits: {found.examples:,} examples a device."
    if found.limit == "search":
        return (
            f"The largest batch that was tried and fits: {found.examples:,} examples a device; the "
            "memory is not full."
        )
    room = ""
    if found.room:  # with two digits, because no batch of this size was compiled
        room = f", where the memory would hold about {float(f'{found.room:.2g}'):,.0f}"
    return (
        f"{found.examples:,} examples a device fit{room}; no more were tried, since the script has "
        f"{subject.examples:,} in all."
    )


def _show_work(plan: Plan, console: Console) -> None:
    compiled, step = plan.compiled, plan.step
    headings = ("kind", "number", "bytes", "of these overlapped")
    shown = table("Collectives of a step", headings, left=1)
    for kind in sorted({each.kind for each in compiled.collectives}):
        alike = [each for each in compiled.collectives if each.kind == kind]
        hidden = sum(each.bytes for each in alike if each.overlap)
        shown.add_row(kind, str(len(alike)), size(_bytes(alike)), size(hidden))
    console.print(shown if compiled.collectives else "Collectives of a step: none.")
    flops = sum(compiled.work.flops.values())
    kinds = ", ".join(compiled.work.flops) or "none"
    console.print(
        f"A step of a device: {flops / 1e9:,.1f} GFLOP ({kinds}), "
        f"{size(compiled.work.memory_bytes)} to and from its memory, "
        f"{size(_bytes(compiled.collectives))} in collectives."
    )
    own = "measured on one device" if plan.measured else "of its own"
    estimate = f", XLA's estimate {milliseconds(step.estimate)}" if step.estimate else ""
    console.print(
        f"A step takes at least {milliseconds(step.total)}: {milliseconds(step.own)} {own} (matrix "
        f"units {milliseconds(step.compute)}, memory {milliseconds(step.memory)}{estimate}) and "
        f"{milliseconds(step.exposed)} of {milliseconds(step.network)} in collectives, which "
        f"nothing hides. What limits is {_LIMITS[step.limit]}.",
        style="bold",
    )


def _show_torch(plan: Plan, console: Console) -> None:
    groups, step = plan.subject.groups, plan.torch_step
    if groups is None or step is None:
        return
    console.print(
        f"On PyTorch workers gather the weights in {len(groups.sizes)} groups: "
        f"{len(groups.collectives())} collectives, {size(_bytes(groups.collectives()))}. Each "
        f"keeps {size(groups.held)} of variables and gradients, and at most "
        f"{size(groups.gathered)} of gathered weights. If a device computes as fast as on JAX, a "
        f"step takes at least {milliseconds(step.total)}, or "
        f"{milliseconds(step.own + step.network)} if nothing overlaps."
    )


def _show_scaling(plan: Plan, console: Console) -> None:
    title = f"Weak scaling: {plan.compiled.batch:,} examples on each device"
    headings = ("devices", "step", "examples/s", "efficiency", "if nothing overlaps", "limit")
    shown = table(title, headings)
    for each in plan.scaling:
        shown.add_row(
            f"{each.devices:,}",
            milliseconds(each.total),
            f"{_throughput(each, plan):,.0f}",
            f"{each.efficiency:.1%}",
            f"{each.efficiency_without_overlap:.1%}",
            each.limit,
            style="bold" if each.devices == plan.target.devices else None,
        )
    console.print(shown)


def as_json(plan: Plan) -> str:
    """Returns a plan as JSON. Sizes are in bytes, and times in seconds."""
    compiled, largest, target = plan.compiled, plan.largest_batch, plan.target
    layout = plan.subject.layout
    facts: dict[str, object] = {
        **asdict(replace(plan.subject, layout=None)),
        "layout": layout and {"divided": layout.divided, "variables": layout.rows},
        "backend": "jax",
        "target": {"name": str(target), "chip": target.chip.title, "devices": target.devices},
        "batch_per_device": compiled.batch,
        "global_batch": compiled.batch * target.devices,
        "fits": plan.fits,
        "memory": {
            "usable": target.usable,
            "needed": compiled.total,
            "by_kind": dict(compiled.memory),
            "refused": compiled.refused,
        },
        "largest_batch_per_device": largest and largest.examples,
        "largest_batch_limit": largest and largest.limit,
        "flops": dict(compiled.work.flops),
        "memory_traffic": compiled.work.memory_bytes,
        "host_bytes": compiled.work.host_bytes,
        "collectives": [asdict(each) for each in compiled.collectives],
        "step": _step(plan.step, plan) if compiled.refused is None else None,
        "scaling": [_step(each, plan) for each in plan.scaling] if not compiled.refused else [],
        "torch_step": None if plan.torch_step is None else _step(plan.torch_step, plan),
        "sources": _sources(plan),
    }
    return json.dumps(facts, indent=2)


def _step(step: StepTime, plan: Plan) -> dict[str, object]:
    return {
        **asdict(step),
        "total": step.total,
        "examples_per_second": _throughput(step, plan),
        "efficiency": step.efficiency,
        "efficiency_without_overlap": step.efficiency_without_overlap,
        "limit": step.limit,
    }


def _throughput(step: StepTime, plan: Plan) -> float:
    return plan.compiled.batch * step.devices / step.total if step.total else float("inf")


def plot(plan: Plan, path: Path) -> None:
    """Draws the efficiency against the number of devices, with the throughput at each point."""
    counts = [each.devices for each in plan.scaling]
    ours = [each.efficiency for each in plan.scaling]
    worst = [each.efficiency_without_overlap for each in plan.scaling]
    title = f"{plan.subject.script}: efficiency, and examples a second"
    x = f"{plan.target.chip.title}, {plan.compiled.batch:,} examples on each"
    with figure(path, title, counts, x, "efficiency against one device") as axes:
        axes.axhline(1.0, color="0.6", linestyle="--")
        axes.fill_between(
            counts, worst, ours, color="tab:blue", alpha=0.2, label="with less overlap"
        )
        axes.plot(counts, ours, "o-", color="tab:blue", label="predicted")
        rates = ["{:.3g}{}/s".format(*scaled(_throughput(each, plan))) for each in plan.scaling]
        annotate(axes, counts, ours, rates, 8)
        axes.set_xscale("log", base=2)
        axes.set_ylim(0, 1.12)
        axes.yaxis.set_major_formatter("{x:.0%}")


def _bytes(collectives: Sequence[Collective]) -> int:
    return sum(each.bytes for each in collectives)
