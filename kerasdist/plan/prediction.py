"""How long a step takes, from what its compiled program computes, moves and exchanges.

A device needs as long as the slower of its units and its memory, both at their full rates, or as
XLA estimates for its instructions, if that is longer. No program is faster, most are slower.
Collectives come on top, except for what XLA has put between their starts and their ends. Their
times follow the usual model of latency and bandwidth, with sums in rings over the fast links;
between machines or slices each chip sends its part.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

from kerasdist.plan.hardware import Chip
from kerasdist.plan.hlo import Collective
from kerasdist.plan.targets import Target, group_of

COUNTS = (1, 8, 64, 512, 4096)
"""The numbers of devices of the scaling table."""

_WRAPPED = 4  # from how many chips on an axis of a TPU v5p are its ends connected
_WRAPPED_2D = 16  # the same on a TPU v5e or v6e, whose slices are parts of a 16 x 16 pod


@final
@dataclass(frozen=True)
class Work:
    """What one device does in a step, besides collectives.

    Attributes:
        flops: Operations of its matrix units, by the type of the operands.
        memory_bytes: Bytes that go between the chip and its memory.
        cycles: XLA's estimate of the cycles of all instructions; 0: there is none.
    """

    flops: Mapping[str, float]
    memory_bytes: float
    cycles: float = 0.0


@final
@dataclass(frozen=True)
class StepTime:
    """The time of a step, in seconds.

    Attributes:
        devices: How many devices take part.
        compute: What the matrix units need.
        memory: What the memory needs.
        estimate: What XLA estimates for the instructions, 0 if it does not.
        own: What a device needs without the others: the largest of these, or as measured.
        network: What all collectives need.
        exposed: The part of it that the device's own work does not hide.
    """

    devices: int
    compute: float
    memory: float
    estimate: float
    own: float
    network: float
    exposed: float

    @property
    def total(self) -> float:
        """How long the step takes."""
        return self.own + self.exposed

    @property
    def efficiency(self) -> float:
        """The throughput of a device, as a part of that of a device alone with the same batch."""
        return self.own / self.total if self.total else 1.0

    @property
    def efficiency_without_overlap(self) -> float:
        """The same, if collectives overlapped with nothing."""
        whole = self.own + self.network
        return self.own / whole if whole else 1.0

    @property
    def limit(self) -> str:
        """What the time goes to most.

        ``"compute"``, ``"memory"``, ``"network"``, or ``"instructions"`` where these are many and
        short, so that neither units nor memory are busy.
        """
        if self.exposed > self.own:
            return "network"
        if self.estimate > 2 * max(self.compute, self.memory):
            return "instructions"
        return "compute" if self.compute >= self.memory else "memory"


def step_time(
    work: Work,
    collectives: Sequence[Collective],
    target: Target,
    measured: float | None = None,
) -> StepTime:
    """Predicts the time of a step.

    Args:
        work: What each device does.
        collectives: The collectives of the step.
        target: The devices.
        measured: The time of a step on one device with the same batch, in seconds, where it is
            known; in place of what the chip allows.
    """
    chip = target.chip
    compute = sum(flops / _rate(chip, kind) for kind, flops in work.flops.items())
    memory = work.memory_bytes / chip.memory_rate
    estimate = work.cycles / chip.clock if chip.clock else 0.0
    own = max(compute, memory, estimate) if measured is None else measured
    times = [collective_time(each, target) for each in collectives]
    hidden = sum(
        min(time, each.overlap * own) for time, each in zip(times, collectives, strict=True)
    )
    network = sum(times)
    exposed = network - min(hidden, own)
    return StepTime(target.devices, compute, memory, estimate, own, network, exposed)


def _rate(chip: Chip, kind: str) -> float:
    return chip.flops.get(kind, min(chip.flops.values()))


def scaling(
    work: Work, collectives: Sequence[Collective], target: Target, measured: float | None = None
) -> list[StepTime]:
    """Predicts the step for groups of other sizes, each device with the same batch.

    What the replicas exchange are sums of gradients, and gathered weights where they divide these:
    the same collectives in groups of all sizes.
    """
    counts = sorted({*COUNTS, target.devices})
    groups = [target if n == target.devices else group_of(target.chip, n) for n in counts]
    return [step_time(work, collectives, group, measured) for group in groups]


def collective_time(collective: Collective, target: Target) -> float:
    """Returns the seconds that a collective over all devices of a target takes."""
    chip, all_devices = target.chip, target.devices
    taking_part = collective.devices or all_devices
    if all_devices == 1:
        return 0.0
    # A group smaller than a machine, such as the logical devices of a replica, stays in one.
    local = 1 < taking_part < min(target.domain, all_devices)
    inside = taking_part if local else target.domain
    groups = 1 if local else all_devices // inside
    passes = 2 if collective.kind == "all-reduce" else 1
    links = chip.link_rate if chip.axes == 0 else _torus_rate(target)
    fast = passes * collective.bytes * (inside - 1) / inside / links
    part = collective.bytes / inside
    slow = passes * part * (groups - 1) / groups / chip.network_rate
    return _latency(target, inside, groups, passes) + max(fast, slow)


def _torus_rate(target: Target) -> float:
    """Returns the rate of a chip's links to neighbours; an axis that is not closed has half."""
    chip = target.chip
    used = sum(1.0 if _is_closed(size, chip) else 0.5 for size in target.shape if size > 1)
    return chip.link_rate * max(used, 0.5) / chip.axes


def _is_closed(size: int, chip: Chip) -> bool:
    return size >= (_WRAPPED if chip.axes == 3 else _WRAPPED_2D)


def _latency(target: Target, inside: int, groups: int, passes: int) -> float:
    chip = target.chip
    between = math.log2(groups) * chip.network_latency
    if chip.axes:
        # Data go both ways around a closed axis: the furthest chip is half the axis away.
        hops = sum(size // 2 if _is_closed(size, chip) else size - 1 for size in target.shape)
        return passes * (hops * chip.link_latency + between)
    slower = 1.8 if groups > 1 else 1.0  # as NCCL's model has it
    steps = (inside - 1) * chip.link_latency * slower
    return chip.base_latency + passes * (steps + between)
