"""User-defined functions and classes, in a form that is equal in equal scripts.

That form is bytecode: it holds no addresses, paths or line numbers. It differs between versions of
Python, so it is compared only where all workers run the same version (see `without`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any, cast

# The key of the digests of code, among the facts that workers compare.
KEY = "code"

# Names whose values differ by worker, so they are not compared.
OWN = frozenset(
    {
        "chief",
        "device",
        "hostname",
        "index",
        "is_chief",
        "is_main",
        "local_rank",
        "log_dir",
        "name",
        "pid",
        "process_id",
        "process_index",
        "rank",
        "replica_id",
        "seed",
        "task_id",
        "task_index",
        "verbose",
        "worker",
        "worker_id",
        "worker_index",
    }
)

# Packages whose versions are compared, in place of their code.
_PACKAGES = frozenset(
    {"abc", "builtins", "jax", "keras", "kerasdist", "numpy", "tensorflow", "torch", "typing"}
)


def is_of_user(function_or_class: Any) -> bool:
    """Returns whether a function or class belongs to neither Keras, a framework, nor kerasdist."""
    module = getattr(function_or_class, "__module__", None) or "builtins"
    return module.partition(".")[0] not in _PACKAGES


def of_function(function: FunctionType) -> dict[str, Any]:
    """Returns what a function computes: its code, and the plain values that it uses."""
    facts: dict[str, Any] = {"function": function.__name__}
    if is_of_user(function):
        facts[KEY] = _digest(function.__code__)
        values = {name: value for name, value in _used(function) if _is_compared(name, value)}
        facts.update({"uses": values} if values else {})
    return facts


def of_class(kind: type) -> dict[str, str]:
    """Returns a digest of the user-defined methods by its key, nothing if there are none."""
    parts = [
        f"{name} {_digest(function.__code__)}"
        for parent in kind.__mro__
        if is_of_user(parent)
        for name, function in sorted(_functions_of(parent))
    ]
    return {KEY: hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]} if parts else {}


def without(facts: Any) -> Any:
    """Returns facts without digests of code."""
    if isinstance(facts, dict):
        named = cast("dict[str, Any]", facts)
        return {name: without(value) for name, value in named.items() if name != KEY}
    return [without(one) for one in cast("list[Any]", facts)] if isinstance(facts, list) else facts


def _is_compared(name: str, value: Any) -> bool:
    if name.lower() in OWN or (isinstance(value, str) and ("/" in value or "\\" in value)):
        return False  # a path, which may differ by worker
    return isinstance(value, bool | int | float | str | None)


def _functions_of(kind: type) -> Iterator[tuple[str, FunctionType]]:
    for name, member in vars(kind).items():
        if isinstance(member, property):
            member = member.fget  # noqa: PLW2901
        elif isinstance(member, staticmethod | classmethod):
            member = member.__func__  # noqa: PLW2901
        if isinstance(member, FunctionType):
            yield name, member


def _used(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """The defaults, the closure and the globals of a function, by name."""
    code = function.__code__
    defaults = function.__defaults__ or ()
    parameters = code.co_varnames[: code.co_argcount][-len(defaults) :] if defaults else ()
    yield from zip(parameters, defaults, strict=True)
    yield from (function.__kwdefaults__ or {}).items()
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            value = cell.cell_contents
        except ValueError:  # not set yet
            continue
        yield name, value
    for one in _nested(code):
        for name in one.co_names:
            if name in function.__globals__ and name[:2] != "__":
                yield name, function.__globals__[name]


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)


def _digest(code: CodeType) -> str:
    constants = [
        _digest(constant)
        if isinstance(constant, CodeType)
        else repr(sorted(map(repr, constant)) if isinstance(constant, frozenset) else constant)
        for constant in code.co_consts
    ]
    parts = (code.co_code.hex(), code.co_names, code.co_varnames, code.co_freevars, constants)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
