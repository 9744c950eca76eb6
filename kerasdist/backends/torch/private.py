"""All code that uses non-public functions of PyTorch, which `internals.py` declares."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from kerasdist.backends.torch import internals
from kerasdist.core.internals import Internal


def _multiply_one_by_one(tensors: Sequence[torch.Tensor], factor: float) -> list[torch.Tensor]:
    return [one * factor for one in tensors]


def _add_one_by_one(tensors: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> None:
    for one, other in zip(tensors, others, strict=True):
        one.add_(other)


def _copy_one_by_one(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


# Each function from here to `_looked_up` replaces itself in this module at its first call. It is
# replaced by torch's own function or, if torch lacks that, by a substitute. Later calls go directly
# to the new function.


def multiply_each(tensors: Sequence[torch.Tensor], factor: float) -> Sequence[torch.Tensor]:
    """Returns each tensor multiplied by a number."""
    return _looked_up("multiply_each", internals.MULTIPLY_EACH, _multiply_one_by_one)(
        tensors, factor
    )


def add_to_each(tensors: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> object:
    """Adds to each tensor, in place, the other tensor at the same position."""
    return _looked_up("add_to_each", internals.ADD_TO_EACH, _add_one_by_one)(tensors, others)


def copy_to_each(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> object:
    """Copies into each target the values of the source at the same position."""
    return _looked_up("copy_to_each", internals.COPY_TO_EACH, _copy_one_by_one)(targets, sources)


def function_modes() -> Sequence[Any]:
    """Returns this thread's modes that intercept functions of torch, the innermost last."""
    return _looked_up("function_modes", internals.FUNCTION_MODES, list)()


def dispatch_modes() -> Sequence[Any]:
    """Returns this thread's modes that intercept operators of torch, the innermost last."""
    return _looked_up("dispatch_modes", internals.DISPATCH_MODES, list)()


def saved_tensors_hooks(in_traces: bool) -> Any:
    """Returns this thread's hooks that pack and unpack tensors saved for backward, or None.

    With `in_traces`, the hooks are returned even while torch traces code.
    """
    hooks = internals.SAVED_TENSORS_HOOKS
    return _looked_up("saved_tensors_hooks", hooks, lambda _: None)(in_traces)


def may_be_transformed() -> bool:
    """Returns whether a transform of torch.func is active; True if this torch cannot tell."""
    active = internals.ARE_TRANSFORMS_ACTIVE
    return _looked_up("may_be_transformed", active, lambda: True)()


def _looked_up(name: str, internal: Internal, otherwise: Callable[..., Any]) -> Callable[..., Any]:
    """Returns torch's function, or `otherwise`, and stores it in this module under `name`."""
    found = internal.get() if internal.is_there() else otherwise
    globals()[name] = found
    return found


def count_changes(tensor: torch.Tensor) -> int:
    """Returns a number that grows with every change of a tensor in place."""
    return _counter_of_changes()(tensor)


@functools.cache
def _counter_of_changes() -> Callable[[torch.Tensor], int]:
    internals.COUNT_OF_CHANGES.require()
    return operator.attrgetter(internals.COUNT_OF_CHANGES.attribute)


def call_after_backward(function: Callable[[], object]) -> None:
    """Calls a function at the end of the running backward pass."""
    internals.CALL_AFTER_BACKWARD.get()(function)


def compiler_errors() -> tuple[type[Exception], ...]:
    """Returns the classes of the errors that torch raises for code that it cannot compile."""
    error = internals.COMPILER_ERROR
    return (error.get(),) if error.is_there() else ()


Run = Callable[[Any, Sequence[Any], Mapping[str, Any]], object]


def intercept(run: Run, kind: type | None = None) -> AbstractContextManager[object]:
    """Returns a context in which ``run(operation, args, kwargs)`` runs each operation of torch.

    With `kind`, a class of tensors, `run` gets only operations with an argument of that class.
    """
    return _interceptor()(run, kind)


@functools.cache
def _interceptor() -> type[Any]:
    class Interceptor(internals.DISPATCH_MODE.get()):
        def __init__(self, run: Run, kind: type | None) -> None:
            super().__init__()
            self.run, self.kind = run, kind

        def __torch_dispatch__(
            self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
        ) -> object:
            if self.kind is not None and self.kind not in types:
                return func(*args, **(kwargs or {}))
            return self.run(func, args, kwargs or {})

    return Interceptor


def require_interception() -> None:
    """Raises an error if torch's operators, or what they write to, cannot be observed."""
    for internal in (internals.DISPATCH_MODE, internals.OPERATION_SCHEMA):
        internal.require()


def list_written(operation: Any) -> list[tuple[int, str]]:
    """Returns the positions and names of the parameters that an operator of torch writes to."""
    arguments = internals.OPERATION_SCHEMA.of(operation).arguments
    return [
        (place, one.name)
        for place, one in enumerate(arguments)
        if one.alias_info is not None and one.alias_info.is_write
    ]
