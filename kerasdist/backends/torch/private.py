"""Intercepts the operators of torch. For this it uses parts of torch that are not public."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from kerasdist.backends.torch import internals
from kerasdist.core.internals import with_base

Run = Callable[[Any, Sequence[Any], Mapping[str, Any]], object]


def intercept(run: Run, kind: type | None = None) -> AbstractContextManager[object]:
    """Returns a context in which torch calls ``run(operation, args, kwargs)`` for each operation.

    `run` performs the operation, and returns its result. If `kind`, a class of tensors, is given,
    torch calls `run` only for operations that have an argument of that class.
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
    """Raises an error if torch lacks the private parts that this module uses."""
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
