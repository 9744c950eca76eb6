"""Interception of torch's operators, by parts of torch that are not public."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from kerasdist.backends.torch import internals
from kerasdist.core.internals import with_base

Run = Callable[[Any, Sequence[Any], Mapping[str, Any]], object]


def intercept(run: Run, kind: type | None = None) -> AbstractContextManager[object]:
    """Returns a context in which ``run(operation, args, kwargs)`` runs each operation of torch.

    With `kind`, a class of tensors, `run` gets only operations with an argument of that class.
    """
    return with_base(_Interceptor, internals.DISPATCH_MODE.value)(run, kind)


class _Interceptor:
    def __init__(self, run: Run, kind: type | None) -> None:
        super().__init__()
        self.run, self.kind = run, kind

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> object:
        if self.kind is not None and self.kind not in types:
            return func(*args, **(kwargs or {}))
        return self.run(func, args, kwargs or {})


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
