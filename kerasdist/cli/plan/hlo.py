"""Reads the collectives and the work of a compiled program from XLA's text of the program."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import final

_KINDS = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
_HEADER = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\{$")
_LINE = re.compile(r"^\s*(?:ROOT )?%?([\w.-]+) = (.*?) ([a-z][\w-]*)\((.*)")
_ARRAY = re.compile(r"\b([a-z]\w*?)\[([\d,]*)\](\{[^}]*\})?")
_ON_CHIP = "S(1)"  # the memory space of a TPU's vector memory, which the program manages
_COLLECTIVE = re.compile(rf"({_KINDS})(-start)?")
_GROUPS = re.compile(r"replica_groups=(?:\[(\d+),(\d+)\]|\{\{([\d,]*)\})")
# groups of devices along axes of a mesh
_MESH_GROUPS = re.compile(r"replica_groups=mesh\[([^\]]*)\] ?\{([^}]*)\}")
_MESH_AXIS = re.compile(r"'(\w+)'=(\d+)")
# the name of a mesh axis; if a group covers only a part of the axis, also the size of the part
_GROUP_AXIS = re.compile(r"'(\w+)'(?::\(\d+\)(\d+))?")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_NO_ESTIMATE = 2**63 - 1  # libtpu writes this if it has no estimate
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
# the role of a computation that an instruction runs, such as `body`, and the computation's name
_CALLED = re.compile(r"(to_apply|(?:true|false)_computation|calls|body|condition)=%?([\w.-]+)")
# libtpu fuses an all-reduce with the operation that keeps only a slice of the sum on each device.
# The fused computation, whose name begins with `_SUMS_PARTS`, does the work of a reduce-scatter.
# libtpu also fuses a collective with other work. Such a collective runs from a fusion whose name
# begins with `_STARTS` to a fusion whose name begins with `_ENDS`.
_SUMS_PARTS = "all-reduce-scatter"
_STARTS, _ENDS = "async-collective-start", "async-collective-done"
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_NAME = re.compile(r"%([\w.-]+)")
# These operations neither compute nor move data.
_FREE = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all"),
    *("opt-barrier", "partition-id", "replica-id"),
}
# These operations read only as many bytes of their operand as they return.
_PARTIAL = {"copy", "copy-start", "slice", "slice-start", "dynamic-slice", "gather"}


@final
@dataclass(frozen=True)
class Collective:
    """A collective operation of a step.

    Attributes:
        kind: XLA's name for the operation, such as ``"all-reduce"``.
        bytes: The size of the full array: the sum, the gathered array, or the array to scatter.
        devices: How many devices take part; 0 means all devices.
        overlap: The fraction of the step's other work that XLA has put between the start and the
            end of this collective. The work of an instruction is XLA's estimate of its cycles, or,
            without an estimate, the bytes that it writes.
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

    @property
    def operands(self) -> list[str]:
        return _NAME.findall(self.rest.partition(")")[0])

    @property
    def called(self) -> dict[str, str]:
        """The names of the computations that the instruction runs, by role, such as ``"body"``."""
        return dict(_CALLED.findall(self.rest))

    @property
    def cycles(self) -> int:
        match = _CYCLES.search(self.rest)
        estimate = int(match[1]) if match else 0
        return 0 if estimate == _NO_ESTIMATE else estimate


_Program = dict[str, list[_Instruction]]
"""The instructions of each computation, by the computation's name."""


def _read(text: str) -> tuple[_Program, list[_Instruction]]:
    """Returns a program's computations by name, and the entry computation."""
    found: _Program = {}
    entry = current = list[_Instruction]()
    for line in text.splitlines():
        if header := _HEADER.match(line):
            current = found[header[2]] = []
            entry = current if header[1] else entry
        elif match := _LINE.match(line):
            current.append(_Instruction(*match.groups()))
    return found, entry


def collectives(text: str) -> list[Collective]:
    """Returns the collectives of a compiled program; a collective inside of a loop counts once.

    Args:
        text: The scheduled program, in the form that `jax.stages.Compiled.as_text` returns.
    """
    known = _read(text)[0]
    fused = {_fused_by(each) for one in known.values() for each in one}
    shown = [instructions for name, instructions in known.items() if name not in fused]
    return [one for instructions in shown for one in _collectives_in(instructions, known)]


def _collectives_in(instructions: Sequence[_Instruction], known: _Program) -> list[Collective]:
    found: list[Collective] = []
    own = [_collective(each, known) for each in instructions]
    work = [_weight(each, one) for each, one in zip(instructions, own, strict=True)]
    ends = {
        name: place
        for place, each in enumerate(instructions)
        if each.operation.endswith("-done")
        for name in each.operands
    }
    fused_ends = [n for n, each in enumerate(instructions) if each.name.startswith(_ENDS)]
    for place, (each, one) in enumerate(zip(instructions, own, strict=True)):
        end = ends.get(each.name, place)
        if one is not None and each.operation == "fusion":
            if each.name.startswith(_STARTS):
                end = next((n for n in fused_ends if n > place), place)
            elif one.kind != "reduce-scatter":
                continue  # this fusion continues or ends a collective that was counted before
        if one is not None:
            found.append(replace(one, overlap=sum(work[place + 1 : end]) / (sum(work) or 1)))
    return found


def _collective(each: _Instruction, known: _Program) -> Collective | None:
    """Returns the collective that an instruction is or contains, or None.

    Its overlap is 0: `_collectives_in` computes the real overlap.
    """
    if match := _COLLECTIVE.fullmatch(each.operation):
        size = _whole_size(match[1], each, asynchronous=bool(match[2]))
        return Collective(match[1], size, _group_size(each.rest), 0.0)
    name = _fused_by(each)
    inside = filter(None, (_collective(one, {}) for one in known.get(name, ())))
    one = next(inside, None)
    if one is not None and name.startswith(_SUMS_PARTS):
        return replace(one, kind="reduce-scatter")
    return one


def _fused_by(each: _Instruction) -> str:
    """Returns the name of the computation that a fusion runs; empty for any other instruction."""
    return each.called.get("calls", "") if each.operation == "fusion" else ""


def _weight(each: _Instruction, own: Collective | None) -> int:
    if each.operation in _FREE or _COLLECTIVE.match(each.operation):
        return 0
    if own is not None and (own.kind == "reduce-scatter" or each.name.startswith((_STARTS, _ENDS))):
        return 0  # such a fusion has no work besides the collective
    return each.cycles or size_of(each.shape)


def device_work(text: str) -> tuple[float, float]:
    """Returns the work of one device in a compiled program, besides collectives.

    The first number is the bytes that move between the chip and its memory: each kernel reads its
    operands and writes its results once. Operands and results in on-chip memory do not count. The
    second number is the clock cycles of all instructions by XLA's estimate, or 0 if there is no
    estimate. The body of a loop counts as often as the loop runs.

    Args:
        text: The program, as for `collectives`.
    """
    computations, entry = _read(text)
    return _work_of(entry, computations, trips=1)


def _work_of(instructions: list[_Instruction], known: _Program, trips: int) -> tuple[float, float]:
    shapes = {each.name: each.shape for each in instructions}
    memory_bytes = cycles = 0.0
    for each in instructions:
        if each.operation == "while":
            body = known[each.called["body"]]
            count = _trips(each, known)
            in_body = _work_of(body, known, count)
            memory_bytes, cycles = memory_bytes + count * in_body[0], cycles + count * in_body[1]
        elif each.operation in ("call", "conditional"):
            branches = _BRANCHES.search(each.rest)
            names = each.called.values() or _NAME.findall(branches[1] if branches else "")
            called = max((_work_of(known[name], known, trips) for name in names), default=(0, 0))
            memory_bytes, cycles = memory_bytes + called[0], cycles + called[1]
        else:
            memory_bytes += _traffic(each, shapes, trips)
            cycles += each.cycles
    return memory_bytes, cycles


def _trips(loop: _Instruction, known: _Program) -> int:
    """Returns how often a loop runs: XLA's count, or the largest constant in its condition."""
    if match := _TRIPS.search(loop.rest):
        return int(match[1])
    limits = [
        int(match[1])
        for each in known[loop.called["condition"]]
        if each.operation == "constant" and (match := re.match(r"(\d+)\)", each.rest))
    ]
    return max(limits, default=1)


def _traffic(each: _Instruction, shapes: Mapping[str, str], trips: int) -> float:
    if (
        each.operation in _FREE
        or each.operation.endswith("-done")
        or _COLLECTIVE.fullmatch(each.operation)
        or "AllocateBuffer" in each.rest
    ):
        return 0.0
    operands = [shapes.get(name, "") for name in dict.fromkeys(each.operands)]
    if each.operation in _PARTIAL:
        arrays = list(_ARRAY.finditer(each.shape))[:1]
        ends = (*(one[0] for one in arrays), *operands[:1])
        return float(sum(size_of(one[0]) for one in arrays) * sum(_ON_CHIP not in x for x in ends))
    # If an array has one row for each iteration of a loop, each run of the loop's body reads or
    # writes only one row. So only the bytes of one row are counted.
    return sum(
        size / (trips if trips > 1 and leading == trips else 1)
        for shape in (each.shape, *operands)
        for size, leading in _in_memory(shape)
    )


def _in_memory(shape: str) -> list[tuple[int, int]]:
    """Returns the bytes and the first axis's size of each array in the chip's main memory."""
    return [
        (_size(kind, sizes), int(sizes.partition(",")[0] or 0))
        for kind, sizes, layout in _ARRAY.findall(shape)
        if kind != "token" and _ON_CHIP not in layout
    ]


def size_of(shape: str) -> int:
    """Returns the bytes of a shape, or of a tuple of shapes, such as ``f32[8,128]{1,0}``."""
    return sum(_array_sizes(shape))


def _array_sizes(shape: str) -> list[int]:
    return [_size(kind, sizes) for kind, sizes, _ in _ARRAY.findall(shape) if kind != "token"]


def _size(kind: str, sizes: str) -> int:
    digits = re.search(r"\d+", kind)  # the first number, because a name such as f8e4m3fn has others
    bits = int(digits[0]) if digits else 8  # booleans have 8 bits
    return math.prod(int(one) for one in sizes.split(",") if one) * bits // 8


def _whole_size(kind: str, each: _Instruction, *, asynchronous: bool) -> int:
    if kind == "all-reduce":
        return size_of(each.shape)
    sizes = _array_sizes(each.shape)
    if asynchronous:  # the shape lists the operands, and then the results
        return max(sum(sizes[: len(sizes) // 2]), sum(sizes[len(sizes) // 2 :]))
    return sum(sizes) * (_group_size(each.rest) if kind == "reduce-scatter" else 1)


def _group_size(rest: str) -> int:
    if mesh := _MESH_GROUPS.search(rest):
        sizes = dict(_MESH_AXIS.findall(mesh[1]))
        return math.prod(int(part or sizes[axis]) for axis, part in _GROUP_AXIS.findall(mesh[2]))
    match = _GROUPS.search(rest)
    if match is None:
        return 0
    return int(match[2]) if match[2] else len(match[3].split(",")) if match[3] else 0
