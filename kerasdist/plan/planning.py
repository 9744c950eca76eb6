"""Makes a plan from what compilations of a training step show."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, final

from kerasdist.errors import InputError
from kerasdist.plan.hlo import Collective
from kerasdist.plan.prediction import StepTime, Work, scaling, step_time
from kerasdist.plan.targets import Target, group_of

_TRIALS = 3  # compilations at most to find the largest batch, besides the plan's own
_CLOSE = 0.97  # the part of the memory at which the search ends
_AIM = 0.985  # the part at which it aims
_GROWTH = 64  # factor for the next batch where memory does not grow with the batch
_CONSTANT = ("parameters", "optimizer", "metrics", "program")  # kinds to which no example adds


@final
@dataclasses.dataclass(frozen=True)
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
@dataclasses.dataclass(frozen=True)
class Subject:
    """What is planned.

    Attributes:
        script: The file, or ``module:function``.
        strategy: The strategy that the model was made under, None if there was none.
        parameters: How many numbers the model's variables hold.
        examples: How many examples the script's data have, None if not known.
        sharding: What the replicas divide among them: ``"optimizer"``, ``"full"`` or
            ``"LayoutMap"``; None: nothing.
    """

    script: str
    strategy: str | None
    parameters: int
    examples: int | None = None
    sharding: str | None = None


@final
@dataclasses.dataclass(frozen=True)
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
@dataclasses.dataclass(frozen=True)
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
    def usable(self) -> float:
        """The bytes of a device that a program can have."""
        return usable_bytes(self.target)

    @property
    def fits(self) -> bool:
        """Whether the step fits the memory of a device."""
        return fits(self.compiled, self.target)


def usable_bytes(target: Target) -> float:
    """Returns the bytes of a device that a program can have."""
    return target.chip.memory * target.chip.usable


def fits(compiled: Compilation, target: Target) -> bool:
    """Returns whether a step fits the memory of a device."""
    return compiled.refused is None and compiled.total <= usable_bytes(target)


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
    limit = usable_bytes(target)
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
    limit, last = usable_bytes(target), tried[-1]
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
