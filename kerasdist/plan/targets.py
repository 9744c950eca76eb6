"""The accelerators of a plan, as `--devices` names them, and the groups of a scaling table."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import final

from kerasdist.errors import DeviceError
from kerasdist.plan.hardware import CHIPS, Chip

_GPUS = re.compile(r"(?:(\d+)x)?(?:(\d+)x)?([a-z]\w*)")
_TPUS = re.compile(r"(v\w+):(\d+(?:x\d+)*)")
_EXAMPLES = "8xh100, 2x8xh100 (2 machines of 8), v5e:4x4 or v5p:4x4x8"


@final
@dataclass(frozen=True)
class Target:
    """A number of accelerators of one kind, and how they are connected.

    Attributes:
        chip: The kind.
        shape: For GPUs machines and GPUs of each; for TPUs the axes of a slice's torus.
        slices: How many slices there are, of TPUs.
    """

    chip: Chip
    shape: tuple[int, ...]
    slices: int = 1

    def __str__(self) -> str:
        sizes = "x".join(map(str, self.shape))
        if self.chip.platform == "tpu":
            return f"{self.chip.name}:{sizes}" if self.slices == 1 else f"{self.slices} x {sizes}"
        return f"{self.shape[1]}x{self.chip.name}" if self.shape[0] == 1 else self._machines

    @property
    def _machines(self) -> str:
        return f"{self.shape[0]}x{self.shape[1]}x{self.chip.name}"

    @property
    def devices(self) -> int:
        """How many accelerators there are."""
        return math.prod(self.shape) * self.slices

    @property
    def domain(self) -> int:
        """How many of them the fast links connect."""
        return self.shape[1] if self.chip.platform == "cuda" else math.prod(self.shape)

    @property
    def topology(self) -> str:
        """The name by which XLA's compiler knows it."""
        sizes = "x".join(map(str, self.shape))
        return f"1x{sizes}" if self.chip.platform == "cuda" else f"{self.chip.name}:{sizes}"


def parse_target(text: str) -> Target:
    """Reads the value of `--devices`.

    Raises:
        DeviceError: If it names no accelerators that a plan can be made for.
    """
    name = text.strip().lower()
    if match := _TPUS.fullmatch(name):
        chip = _chip(match[1], "tpu", text)
        shape = tuple(map(int, match[2].split("x")))
        if len(shape) != chip.axes:
            raise _wrong(text, f"A slice of {chip.title} has {chip.axes} axes.")
        if 0 in shape or math.prod(shape) > chip.domain:
            raise _wrong(text, f"A slice of {chip.title} has 1 to {chip.domain} chips.")
        return Target(chip, shape)
    if match := _GPUS.fullmatch(name):
        chip = _chip(match[3], "cuda", text)
        first, second = (int(one) if one else 1 for one in match.groups()[:2])
        machines, each = (first, second) if match[2] else (1, first)
        if not machines or not 1 <= each <= chip.domain:
            several = f"{max(2, -(-each // chip.domain))}x{chip.domain}x{chip.name}"
            raise _wrong(text, f"A machine has 1 to {chip.domain} GPUs; several are {several}.")
        return Target(chip, (machines, each))
    raise _wrong(text, f"Known are {', '.join(CHIPS)}.")


def _chip(name: str, platform: str, text: str) -> Chip:
    chip = CHIPS.get(name)
    if chip is None:
        raise _wrong(text, f"Known are {', '.join(CHIPS)}.")
    if chip.platform != platform:
        form = f"{name}:{'x'.join('4' * chip.axes)}" if chip.platform == "tpu" else f"8x{name}"
        raise _wrong(text, f"Write {form}.")
    return chip


def _wrong(text: str, hint: str) -> DeviceError:
    return DeviceError(
        f"Expected accelerators such as {_EXAMPLES}. Received: devices={text!r}. {hint}"
    )


def group_of(chip: Chip, devices: int) -> Target:
    """Returns a target of so many devices: full machines, or slices that are nearly cubes.

    Args:
        chip: The kind.
        devices: A power of two, as far as TPUs are concerned.
    """
    if chip.platform == "cuda":
        each = min(devices, chip.domain)
        return Target(chip, (devices // each, each))
    largest = 1 << (chip.domain.bit_length() - 1)
    in_slice = min(devices, largest)
    shape = [1] * chip.axes
    while math.prod(shape) < in_slice:
        shape[shape.index(min(shape))] *= 2
    return Target(chip, tuple(sorted(shape)), devices // in_slice)
