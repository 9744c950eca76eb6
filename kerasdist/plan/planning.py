"""Makes a plan of what compilations of a training step show."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import final

from kerasdist.errors import InputError
from kerasdist.plan.hlo import Collective
from kerasdist.plan.prediction import StepTime, Work, scaling, step_time
from kerasdist.plan.targets import Target, group_of

_TRIALS = 5  # compilations at most to find the largest batch
_CLOSE = 0.97  # the part of the memory at which the search ends
_GROWTH = 64  # how much further than the last trial the next one goes at most


@final
@dataclasses.dataclass(frozen=True)
class Compilation:
    """What XLA has made of a training step, a device.

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
    """

    script: str
    strategy: str | None
    parameters: int


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
        largest_batch: The most examples a device that fit, None if not looked for, or none fits.
        measured: The measured time of a step on one device that was given, in seconds.
    """

    subject: Subject
    target: Target
    compiled: Compilation
    step: StepTime
    scaling: Sequence[StepTime]
    largest_batch: int | None
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
        subject: What is planned.
        batch: The examples of a device.
        target: The devices.
        compile_step: Compiles the step.
        largest: Whether to look for the largest batch.
        measured: The measured time of a step on one device, in seconds.
    """
    compiled = compile_step(target, batch)
    # One device exchanges nothing, which says nothing of how several would scale.
    several = compiled if target.devices > 1 else compile_step(_smallest_group(target), batch)
    work = compiled.work
    return Plan(
        subject=subject,
        target=target,
        compiled=compiled,
        step=step_time(work, compiled.collectives, target, measured),
        scaling=scaling(work, several.collectives, target, measured),
        largest_batch=largest_batch(compiled, target, compile_step) if largest else None,
        measured=measured,
    )


def _smallest_group(target: Target) -> Target:
    """Returns the smallest target with several devices: a compiler is faster with few."""
    return group_of(target.chip, 4 if target.chip.platform == "tpu" else 2)


def largest_batch(first: Compilation, target: Target, compile_step: Compile) -> int | None:
    """Returns the most examples of a device that fit, to about 3 %; each answer was compiled.

    The memory of a device hardly depends on how many others there are, so that a small group is
    compiled. It grows with the examples in a straight line once they outweigh what is constant.
    """
    small = target if target.devices <= 8 else _smallest_group(target)
    limit = usable_bytes(target)
    below = first if fits(first, target) else None
    above = None if below else first
    last, guess = first, first.batch * 2 if below else max(1, first.batch // 2)
    for _ in range(_TRIALS):
        tried = compile_step(small, guess)
        if fits(tried, target):
            below = tried
        else:
            above = tried
        if below and below.total >= _CLOSE * limit:
            break
        slope = (tried.total - last.total) / (tried.batch - last.batch)
        room = (0.99 * limit - tried.total) / slope if slope > 0 else float("inf")
        upmost = above.batch - 1 if above else tried.batch * _GROWTH
        lowest = below.batch + 1 if below else 1
        last, guess = tried, _rounded(max(lowest, min(tried.batch + room, upmost)))
        if lowest > upmost or guess == tried.batch:
            break
    return below.batch if below else None


def _rounded(batch: float) -> int:
    """Rounds down to a number that devices like."""
    whole = int(batch)
    return whole // 8 * 8 if whole >= 64 else max(1, whole)


def examples_of(global_batch: int, target: Target, asked: int | None) -> int:
    """Returns the examples of a device: as asked for, or the script's batch, divided.

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
