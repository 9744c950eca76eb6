"""Makes a plan from the results of compiling a training step.

The time of a device is the longest of these times: the time of its matrix units at their full rate,
the time of its memory at its full rate, XLA's estimate for its instructions, and the time in which
the variables in the host's memory (`offload`) are copied to the device and back. No program is
faster than this time, and most programs are slower. The time of the collectives is added, except
for the part that other work hides. The times of collectives follow the usual model of latency and
bandwidth: chips form a ring over the fast links, and each chip sends its own part of the data to
other machines or slices.
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
"""The numbers of devices in a plan's table of scaling, besides the target's own number."""

_WRAPPED = 4  # an axis of a TPU v5p with at least this many chips has connected ends
_WRAPPED_2D = 16  # The same number for a TPU v5e or v6e, whose slices are parts of a 16 x 16 pod.


@final
@dataclass(frozen=True)
class Work:
    """The work of one device in a step, besides collectives.

    Attributes:
        flops: Floating-point operations of the matrix units, by the type of the operands.
        memory_bytes: Bytes that move between the chip and its memory.
        cycles: XLA's estimate of the cycles of all instructions; 0 if there is none.
        host_bytes: Bytes in the host's memory that each step copies to the device and back.
    """

    flops: Mapping[str, float]
    memory_bytes: float
    cycles: float = 0.0
    host_bytes: float = 0.0


@final
@dataclass(frozen=True)
class StepTime:
    """The time of a step, in seconds.

    Attributes:
        devices: How many devices take part.
        compute: The time of the matrix units.
        memory: The time in which the device's memory is read and written.
        estimate: XLA's estimate for the instructions; 0 if there is none.
        host: The time of the copies from the host's memory and back, which run while the device
            computes.
        own: The time of a device alone: the largest of the four times above. A measured time
            replaces the first three.
        network: The time of all collectives.
        exposed: The part of the network time that the device's own work does not hide.
    """

    devices: int
    compute: float
    memory: float
    estimate: float
    host: float
    own: float
    network: float
    exposed: float

    @property
    def total(self) -> float:
        """How long the step takes in all."""
        return self.own + self.exposed

    @property
    def efficiency(self) -> float:
        """A device's throughput, relative to that of a single device with the same batch."""
        return self.own / self.total if self.total else 1.0

    @property
    def efficiency_without_overlap(self) -> float:
        """The efficiency that the step would have if collectives did not overlap with any work."""
        whole = self.own + self.network
        return self.own / whole if whole else 1.0

    @property
    def limit(self) -> str:
        """The resource that takes most of the time.

        The value is ``"compute"``, ``"memory"``, ``"network"``, ``"host"`` for the copies from the
        host's memory and back, or ``"instructions"`` if the instructions are so many and so short
        that neither the matrix units nor the memory are busy.
        """
        if self.exposed > self.own:
            return "network"
        if self.host > max(self.compute, self.memory, self.estimate):
            return "host"
        if self.estimate > 2 * max(self.compute, self.memory):
            return "instructions"
        return "compute" if self.compute >= self.memory else "memory"


def step_time(
    work: Work, collectives: Sequence[Collective], target: Target, measured: float | None = None
) -> StepTime:
    """Predicts the time of a step.

    Args:
        work: The work of each device.
        collectives: The collectives of the step.
        target: The devices of the step.
        measured: The measured time of a step on one device with the same batch, in seconds. It
            replaces the times that follow from the chip's rates. None if it is not known.
    """
    chip = target.chip
    slowest = min(chip.flops.values())  # the rate for types that the matrix units do not support
    compute = sum(flops / chip.flops.get(kind, slowest) for kind, flops in work.flops.items())
    memory = work.memory_bytes / chip.memory_rate
    estimate = work.cycles / chip.clock if chip.clock else 0.0
    host = work.host_bytes / chip.host_rate
    own = max(max(compute, memory, estimate) if measured is None else measured, host)
    times = [collective_time(each, target) for each in collectives]
    hidden = sum(
        min(time, each.overlap * own) for time, each in zip(times, collectives, strict=True)
    )
    network = sum(times)
    exposed = network - min(hidden, own)
    return StepTime(target.devices, compute, memory, estimate, host, own, network, exposed)


def scaling(
    work: Work, collectives: Sequence[Collective], target: Target, measured: float | None = None
) -> list[StepTime]:
    """Predicts the time of a step on groups of different sizes, with the same batch on each device.

    The prediction assumes the same collectives for all sizes: sums of gradients, and also gathers
    of weights if the replicas shard weights.
    """
    counts = sorted({*COUNTS, target.devices})
    groups = [target if n == target.devices else group_of(target.chip, n) for n in counts]
    return [step_time(work, collectives, group, measured) for group in groups]


def collective_time(collective: Collective, target: Target) -> float:
    """Returns how many seconds a collective takes on a target."""
    chip, all_devices = target.chip, target.devices
    taking_part = collective.devices or all_devices
    if all_devices == 1:
        return 0.0
    # A group with fewer devices than a machine, such as the devices of a replica, is taken to be
    # inside of one machine.
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
    """Returns the rate of a chip's links; an axis with unconnected ends has half the rate."""
    chip = target.chip
    used = sum(1.0 if _is_closed(size, chip) else 0.5 for size in target.shape if size > 1)
    return chip.link_rate * max(used, 0.5) / chip.axes


def _is_closed(size: int, chip: Chip) -> bool:
    return size >= (_WRAPPED if chip.axes == 3 else _WRAPPED_2D)


def _latency(target: Target, inside: int, groups: int, passes: int) -> float:
    chip = target.chip
    between = math.log2(groups) * chip.network_latency
    if chip.axes:
        # Data go both ways around a closed axis, so the furthest chip is half an axis away.
        hops = sum(size // 2 if _is_closed(size, chip) else size - 1 for size in target.shape)
        return passes * (hops * chip.link_latency + between)
    slower = 1.8 if groups > 1 else 1.0  # NCCL's own model has this factor for several machines
    steps = (inside - 1) * chip.link_latency * slower
    return chip.base_latency + passes * (steps + between)


_TRIALS = 3  # the most compilations in the search for the largest batch, besides the plan's own
_CLOSE = 0.97  # the search ends when a batch fills at least this fraction of the memory
_AIM = 0.985  # the fraction of the memory that the next batch of the search is expected to fill
_GROWTH = 64  # the factor for the next batch if memory does not grow with the batch
# Kinds of memory that do not depend on the number of examples.
_CONSTANT = ("parameters", "optimizer", "metrics", "program")


@final
@dataclass(frozen=True)
class Compilation:
    """The result of compiling a training step, for each device.

    Attributes:
        batch: The number of examples on a device.
        memory: The bytes of memory by kind, such as ``"parameters"`` and ``"optimizer"``.
        work: The work of a device.
        collectives: The collectives between the devices.
        refused: XLA's message if the step does not fit, else None.
        refused_bytes: The bytes that a refused step would need; 0 if XLA's message has no number.
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
        """The bytes of memory that do not depend on the number of examples."""
        return float(sum(self.memory.get(kind, 0) for kind in _CONSTANT))


Compile = Callable[[Target, int], Compilation]
"""A function that compiles the step for a target and a number of examples per device."""


@final
@dataclass(frozen=True)
class Subject:
    """The script and the model that a plan is about.

    Attributes:
        script: The file, or ``module:function``.
        strategy: The name of the strategy that the model was made under; None if there was none.
        parameters: How many numbers the model's variables hold.
        examples: How many examples the script's data have; None if that is not known.
        sharding: What the replicas shard: ``"optimizer"``, ``"full"``, ``"auto"`` or
            ``"LayoutMap"``; None if they shard nothing.
        groups: The groups in which PyTorch's workers gather weights; None if they do not gather.
        layout: How much of each variable a device holds.
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
    """The largest number of examples per device for which the step fits the memory.

    Attributes:
        examples: The number of examples.
        limit: Why the batch is not larger: ``"memory"``; ``"data"`` if the script has no more data;
            ``"search"`` if the search ended before the memory was full.
        room: If the data are the limit, how many examples the memory would hold. The number is
            estimated from two compilations; None if there is no estimate.
    """

    examples: int
    limit: Literal["memory", "data", "search"]
    room: int | None


@final
@dataclass(frozen=True)
class Plan:
    """The memory and the time of a training step on a target.

    Attributes:
        subject: The script and its model.
        target: The devices of the plan.
        compiled: The result of compiling the step.
        step: The time of the step on the target.
        scaling: The time of the step on groups of other sizes, with the same batch on each device.
        largest_batch: The largest batch of a device; None if it was not searched, or if none fits.
        measured: The measured time of a step on one device, in seconds, if the user gave it.
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
        """The time of the step on PyTorch's workers; None if they do not gather weights."""
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
    """Makes a plan for a step on a target.

    Args:
        subject: The script and its model.
        batch: The number of examples per device.
        target: The devices of the plan.
        compile_step: Compiles the step.
        largest: Whether to look for the largest batch.
        measured: The measured time of a step on one device, in seconds.
    """
    compiled = compile_step(target, batch)
    # A step on one device has no collectives, so `scaling` needs those of several devices.
    several = compiled if target.devices > 1 else compile_step(_smallest_group(target), batch)
    work = compiled.work
    most = math.inf if subject.examples is None else max(1, subject.examples // target.devices)
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
    """Returns a small target of several devices: 2 GPUs, or 8 TPUs.

    Four TPUs would be too few: libtpu 0.0.52 crashes when it compiles sums of gradients for
    v5p:1x2x2.
    """
    return group_of(target.chip, 8 if target.chip.platform == "tpu" else 2)


def largest_batch(
    first: Compilation, target: Target, compile_step: Compile, most: float = math.inf
) -> LargestBatch | None:
    """Returns the largest number of examples per device that fits; None if not even one fits.

    Memory grows almost linearly with the number of examples. So two compilations determine a line,
    and one or two more compilations check the number that the line predicts.

    Args:
        first: The compilation of the step with the plan's own batch.
        target: The devices of the plan.
        compile_step: Compiles the step.
        most: How many examples of the script's data there are for each device; infinity if the
            number is not known.
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
    if below.batch >= most:
        room = _at_the_limit(tried, limit) if len(tried) > 1 else None
        return LargestBatch(below.batch, "data", room)
    is_found = below.total >= _CLOSE * limit or _next_guess(tried, target, most) is None
    return LargestBatch(below.batch, "memory" if is_found else "search", None)


def _next_guess(tried: Sequence[Compilation], target: Target, most: float) -> int | None:
    """Returns the number of examples per device to compile next; None if the search is over."""
    limit, last = target.usable, tried[-1]
    below = _largest_that_fits(tried, target)
    lowest = below.batch + 1 if below else 1
    highest = min([most, *(each.batch - 1 for each in tried if not fits(each, target))])
    if (below and below.total >= _CLOSE * limit) or lowest > highest:
        return None
    guess = _at_the_limit(tried, _AIM * limit)
    if guess is None:
        guess = last.batch // 2 if last.refused else last.batch * _GROWTH
    within = int(max(lowest, min(guess, highest)))
    return within if within == most else max(lowest, _rounded(within))


def _largest_that_fits(tried: Sequence[Compilation], target: Target) -> Compilation | None:
    fitting = [each for each in tried if fits(each, target)]
    return max(fitting, key=lambda each: each.batch, default=None)


def _at_the_limit(tried: Sequence[Compilation], limit: float) -> int | None:
    """Returns the number of examples that would fill `limit` bytes, or None if it is not known.

    The number is predicted by a line through the batches and bytes of the last two compilations.
    If there is only one compilation, the line begins at zero examples and `Compilation.constant`
    bytes, so it is too steep. The number is not known if the bytes do not grow with the batch, or
    if XLA has refused the last step without saying how many bytes the step needs.
    """
    last = tried[-1]
    if last.refused and not last.refused_bytes:
        return None
    batch, total = (tried[-2].batch, tried[-2].total) if len(tried) > 1 else (0, last.constant)
    slope = (last.total - total) / (last.batch - batch)
    return max(0, int(last.batch + (limit - last.total) / slope)) if slope > 0 else None


def _rounded(batch: int) -> int:
    """Rounds a batch of at least 64 examples down to a multiple of 8, which suits accelerators."""
    return batch // 8 * 8 if batch >= 64 else batch


def examples_of(global_batch: int, target: Target, asked: int | None) -> int:
    """Returns the examples per device: the user's number, or an equal part of the script's batch.

    Raises:
        InputError: If the script's batch has fewer examples than there are devices.
    """
    if asked is not None:
        return asked
    if global_batch < target.devices:
        raise InputError(
            f"Expected a global batch of at least {target.devices} examples, one for each device. "
            f"Received: {global_batch} examples in the script's first batch. Give "
            "--batch-per-device N, or give fit a larger batch_size."
        )
    return global_batch // target.devices
