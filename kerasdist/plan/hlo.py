"""Reads the collectives of a compiled program from XLA's text of it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

_KINDS = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
_BITS = {"pred": 8, "bf16": 16, "f8e4m3fn": 8, "f8e5m2": 8, "s4": 4, "u4": 4}
_ARRAY = re.compile(r"\b([a-z]\w*?)\[([\d,]*)\]")
_LINE = re.compile(r"^\s*(?:ROOT )?%?([\w.-]+) = (.*?) ([a-z][\w-]*)\((.*)")
_COLLECTIVE = re.compile(rf"({_KINDS})(-start)?")
_GROUPS = re.compile(r"replica_groups=(?:\[(\d+),(\d+)\]|\{\{([\d,]*)\})")
_FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all"}


@final
@dataclass(frozen=True)
class Collective:
    """A collective of a step.

    Attributes:
        kind: XLA's name of it, such as ``"all-reduce"``.
        bytes: The size of the whole array: of the sum, of what is gathered, of what is scattered.
        devices: How many devices take part; 0: all.
        overlap: Which part of the step's other work XLA has put between its start and its end,
            by the bytes that instructions write.
    """

    kind: str
    bytes: int
    devices: int
    overlap: float


@final
@dataclass(frozen=True)
class _Instruction:
    name: str
    shape: str
    operation: str
    rest: str


def collectives(text: str) -> list[Collective]:
    """Returns the collectives of a compiled program; of one in a loop, each once.

    Args:
        text: The program, as `jax.stages.Compiled.as_text` returns it, scheduled.
    """
    found: list[Collective] = []
    for computation in _computations(text):
        work = [0 if _is_free(each) else size_of(each.shape) for each in computation]
        total = sum(work) or 1
        ends = {
            name: place
            for place, each in enumerate(computation)
            if each.operation.endswith("-done")
            for name in re.findall(r"%?([\w.-]+)", each.rest.partition(")")[0])
        }
        for place, each in enumerate(computation):
            match = _COLLECTIVE.fullmatch(each.operation)
            if match is None:
                continue
            between = sum(work[place + 1 : ends.get(each.name, place)]) if match[2] else 0
            size = _whole_size(match[1], each, asynchronous=bool(match[2]))
            found.append(Collective(match[1], size, _group_size(each.rest), between / total))
    return found


def _computations(text: str) -> Iterator[list[_Instruction]]:
    inside: list[_Instruction] = []
    for line in text.splitlines():
        if line.startswith("}"):
            yield inside
            inside = []
        elif match := _LINE.match(line):
            inside.append(_Instruction(*match.groups()))


def _is_free(each: _Instruction) -> bool:
    return each.operation in _FREE or _COLLECTIVE.match(each.operation) is not None


def size_of(shape: str) -> int:
    """Returns the bytes of a shape, or of a tuple of shapes, such as ``f32[8,128]{1,0}``."""
    return sum(_array_sizes(shape))


def _array_sizes(shape: str) -> list[int]:
    return [
        math.prod(int(one) for one in sizes.split(",") if one) * _bits(kind) // 8
        for kind, sizes in _ARRAY.findall(shape)
        if kind != "token"
    ]


def _bits(kind: str) -> int:
    if kind in _BITS:
        return _BITS[kind]
    digits = re.search(r"\d+$", kind)
    return int(digits[0]) if digits else 0


def _whole_size(kind: str, each: _Instruction, *, asynchronous: bool) -> int:
    if kind == "all-reduce":
        return size_of(each.shape)
    sizes = _array_sizes(each.shape)
    if asynchronous:  # a tuple of operands and results
        return max(sum(sizes[: len(sizes) // 2]), sum(sizes[len(sizes) // 2 :]))
    return sum(sizes) * (_group_size(each.rest) if kind == "reduce-scatter" else 1)


def _group_size(rest: str) -> int:
    match = _GROUPS.search(rest)
    if match is None:
        return 0
    return int(match[2]) if match[2] else len(match[3].split(",")) if match[3] else 0
