"""Makes a plan from what compilations of a training step show.

A device needs as long as the slower of its units and its memory, both at their full rates, or as
XLA estimates for its instructions, if that is longer. No program is faster, most are slower.
Collectives come on top, except for what XLA has put between their starts and their ends. Their
times follow the usual model of latency and bandwidth, with sums in rings over the fast links;
between machines or slices each chip sends its part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, final

from kerasdist.cli.plan.groups import WeightGroups
from kerasdist.cli.plan.hlo import Collective
from kerasdist.core.hardware import Chip, Target, group_of
from kerasdist.errors import InputError

if TYPE_CHECKING:
    from kerasdist.api.layouts import ModelLayout

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
    work: Work, collectives: Sequence[Collective], target: Target, measured: float | None = None
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
    slowest = min(chip.flops.values())  # for types that its units do not have
    compute = sum(flops / chip.flops.get(kind, slowest) for kind, flops in work.flops.items())
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


_TRIALS = 3  # compilations at most to find the largest batch, besides the plan's own
_CLOSE = 0.97  # the part of the memory at which the search ends
_AIM = 0.985  # the part at which it aims
_GROWTH = 64  # factor for the next batch where memory does not grow with the batch
_CONSTANT = ("parameters", "optimizer", "metrics", "program")  # kinds to which no example adds


@final
@dataclass(frozen=True)
class Compilation:
    """What XLA has made of a training step, for each device.

    Attributes:
        batch: The examples of a device.
        memory: Bytes by kind.
        work: What the device computes and moves.
        collectives: What the devices exchange.
        refused: XLA's words if the step does not fit, else None.
        refused_bytes: The bytes that XLA says it would need, where it refuses.
    """

    batch: int
    memory: Mapping[str, int]
    work: Work
    collectives: Sequence[Collective]
    refused: str | None
    refused_bytes: float

    @property
    def total(self) -> float:
        """Bytes of memory that a device needs."""
        return max(float(sum(self.memory.values())), self.refused_bytes)

    @property
    def constant(self) -> float:
        """The bytes that are the same for any number of examples."""
        return float(sum(self.memory.get(kind, 0) for kind in _CONSTANT))


Compile = Callable[[Target, int], Compilation]
"""Compiles the step for a target, with so many examples a device."""


@final
@dataclass(frozen=True)
class Subject:
    """What is planned.

    Attributes:
        script: The file, or ``module:function``.
        strategy: The strategy that the model was made under, None if there was none.
        parameters: How many numbers the model's variables hold.
        examples: How many examples the script's data have, None if not known.
        sharding: What the replicas divide among them: ``"optimizer"``, ``"full"``, ``"auto"`` or
            ``"LayoutMap"``; None: nothing.
        groups: The groups in which PyTorch's workers gather the weights; None: they do not.
        layout: What a device holds of the model.
    """

    script: str
    strategy: str | None
    parameters: int
    examples: int | None = None
    sharding: str | None = None
    groups: WeightGroups | None = None
    layout: ModelLayout | None = None


@final
@dataclass(frozen=True)
class LargestBatch:
    """The most examples of a device that fit; they have been compiled.

    Attributes:
        examples: How many.
        limit: What ends them: ``"memory"``; ``"data"``, as the script has no more; ``"search"``, as
            it ended before the memory was full.
        room: Where the data end them, how many the memory may hold by the line through two
            compilations; else None.
    """

    examples: int
    limit: Literal["memory", "data", "search"]
    room: int | None


@final
@dataclass(frozen=True)
class Plan:
    """What a training step needs and takes on a target.

    Attributes:
        subject: What was planned.
        target: The devices.
        compiled: What XLA has made of the step.
        step: Its time on the target.
        scaling: Its time on groups of other sizes, with the same batch a device.
        largest_batch: The most examples of a device, None if not looked for, or none fits.
        measured: The measured time of a step on one device that was given, in seconds.
    """

    subject: Subject
    target: Target
    compiled: Compilation
    step: StepTime
    scaling: Sequence[StepTime]
    largest_batch: LargestBatch | None
    measured: float | None

    @property
    def fits(self) -> bool:
        """Whether the step fits the memory of a device."""
        return fits(self.compiled, self.target)

    @property
    def torch_step(self) -> StepTime | None:
        """The time of the step on PyTorch's workers, None if these gather nothing."""
        groups = self.subject.groups
        if groups is None:
            return None
        return step_time(self.compiled.work, groups.collectives(), self.target, self.measured)


def fits(compiled: Compilation, target: Target) -> bool:
    """Returns whether a step fits the memory of a device."""
    return compiled.refused is None and compiled.total <= target.usable


def make_plan(
    subject: Subject,
    batch: int,
    target: Target,
    compile_step: Compile,
    *,
    largest: bool = True,
    measured: float | None = None,
) -> Plan:
    """Makes a plan.

    Args:
        subject: The script and its model.
        batch: The number of examples per device.
        target: The devices.
        compile_step: Compiles the step.
        largest: Whether to look for the largest batch.
        measured: The measured time of a step on one device, in seconds.
    """
    compiled = compile_step(target, batch)
    # One device exchanges nothing, which says nothing of how several would scale.
    several = compiled if target.devices > 1 else compile_step(_smallest_group(target), batch)
    work = compiled.work
    most = None if subject.examples is None else max(1, subject.examples // target.devices)
    return Plan(
        subject=subject,
        target=target,
        compiled=compiled,
        step=step_time(work, compiled.collectives, target, measured),
        scaling=scaling(work, several.collectives, target, measured),
        largest_batch=largest_batch(compiled, target, compile_step, most) if largest else None,
        measured=measured,
    )


def _smallest_group(target: Target) -> Target:
    """Returns a small target with several devices. libtpu 0.0.52 dies of sums on v5p:1x2x2."""
    return group_of(target.chip, 8 if target.chip.platform == "tpu" else 2)


def largest_batch(
    first: Compilation, target: Target, compile_step: Compile, most: int | None = None
) -> LargestBatch | None:
    """Returns the largest number of examples per device that fits; None if not even one does.

    Memory grows almost linearly with the number of examples: two compilations give the line, one or
    two more check the number that it predicts.

    Args:
        first: The compilation of the plan.
        target: The devices.
        compile_step: Compiles the step.
        most: The examples of a device in all of the script's data, None if not known.
    """
    limit = target.usable
    tried = [first]
    for _ in range(_TRIALS if first.constant < limit else 0):
        guess = _next_guess(tried, target, most)
        if guess is None:
            break
        tried.append(compile_step(target, guess))
    below = _largest_that_fits(tried, target)
    if below is None:
        return None
    if most is not None and below.batch >= most:
        room = _at_the_limit(tried, limit) if len(tried) > 1 else None
        return LargestBatch(below.batch, "data", room)
    is_found = below.total >= _CLOSE * limit or _next_guess(tried, target, most) is None
    return LargestBatch(below.batch, "memory" if is_found else "search", None)


def _next_guess(tried: Sequence[Compilation], target: Target, most: int | None) -> int | None:
    """Returns how many examples to compile for next; None if the answer is among those tried."""
    limit, last = target.usable, tried[-1]
    below = _largest_that_fits(tried, target)
    above = min((each.batch for each in tried if not fits(each, target)), default=None)
    lowest = below.batch + 1 if below else 1
    highest = min((one for one in (above and above - 1, most) if one is not None), default=None)
    if (below and below.total >= _CLOSE * limit) or (highest is not None and lowest > highest):
        return None
    guess = _at_the_limit(tried, _AIM * limit)
    if guess is None:
        guess = last.batch // 2 if last.refused else last.batch * _GROWTH
    within = max(lowest, guess if highest is None else min(guess, highest))
    return within if within == most else max(lowest, _rounded(within))


def _largest_that_fits(tried: Sequence[Compilation], target: Target) -> Compilation | None:
    fitting = [each for each in tried if fits(each, target)]
    return max(fitting, key=lambda each: each.batch, default=None)


def _at_the_limit(tried: Sequence[Compilation], limit: float) -> int | None:
    """Returns where the line through the last two compilations reaches a number of bytes.

    After one compilation it goes through the bytes that no example adds to, which leaves the growth
    too steep. None if the bytes do not grow, or a size is not known.
    """
    last = tried[-1]
    if last.refused and not last.refused_bytes:
        return None
    batch, total = (tried[-2].batch, tried[-2].total) if len(tried) > 1 else (0, last.constant)
    slope = (last.total - total) / (last.batch - batch)
    return max(0, int(last.batch + (limit - last.total) / slope)) if slope > 0 else None


def _rounded(batch: int) -> int:
    """Rounds down to a number that devices like."""
    return batch // 8 * 8 if batch >= 64 else batch


def examples_of(global_batch: int, target: Target, asked: int | None) -> int:
    """Returns the examples per device: as the user asked, or the script's batch, divided.

    Raises:
        InputError: If the script's batch has fewer examples than there are devices.
    """
    if asked is not None:
        return asked
    if global_batch < target.devices:
        raise InputError(
            f"Expected a global batch of at least {target.devices} examples, one for each device. "
            f"Received: {global_batch} examples in the script's first batch. Give "
            "--batch-per-device N, or a larger batch_size to fit."
        )
    return global_batch // target.devices
