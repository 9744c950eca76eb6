"""All that touches what is not public in PyTorch; `internals.py` declares it."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from kerasdist.backends.torch import internals


def _multiply_one_by_one(tensors: Sequence[torch.Tensor], factor: float) -> list[torch.Tensor]:
    return [one * factor for one in tensors]


def _add_one_by_one(tensors: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> None:
    for one, other in zip(tensors, others, strict=True):
        one.add_(other)


def _copy_one_by_one(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


# A call of these in a step is one of torch's own function, by no wrapper. They are looked up at
# once, as there is something in their place if they are gone.
multiply_each: Callable[[Sequence[torch.Tensor], float], Sequence[torch.Tensor]] = (
    internals.MULTIPLY_EACH.get() if internals.MULTIPLY_EACH.is_there() else _multiply_one_by_one
)
"""Returns each tensor times a number."""

add_to_each: Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], object] = (
    internals.ADD_TO_EACH.get() if internals.ADD_TO_EACH.is_there() else _add_one_by_one
)
"""Adds to each tensor another one, in place."""

copy_to_each: Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], object] = (
    internals.COPY_TO_EACH.get() if internals.COPY_TO_EACH.is_there() else _copy_one_by_one
)
"""Copies into each tensor another one's values."""


def count_changes(tensor: torch.Tensor) -> int:
    """Returns a number that every change of a tensor in place increases."""
    return _counter_of_changes()(tensor)


@functools.cache
def _counter_of_changes() -> Callable[[torch.Tensor], int]:
    internals.COUNT_OF_CHANGES.require()
    return operator.attrgetter(internals.COUNT_OF_CHANGES.attribute)


def call_after_backward(function: Callable[[], object]) -> None:
    """Calls a function at the end of the backward pass that is running."""
    internals.CALL_AFTER_BACKWARD.get()(function)


def batch_norm_classes() -> tuple[type[torch.nn.Module], ...]:
    """Returns the classes of which torch's batch normalizations are."""
    if internals.BATCH_NORM.is_there():
        return (internals.BATCH_NORM.get(),)
    nn = torch.nn
    lazy = nn.LazyBatchNorm1d, nn.LazyBatchNorm2d, nn.LazyBatchNorm3d
    return nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, *lazy


@functools.cache
def _has_batch_norm_kernels() -> bool:
    kernels = internals.NORMALIZE_ROWS, internals.REDUCE_NORMALIZED
    return all(one.is_there() for one in (*kernels, internals.ARE_TRANSFORMS_ACTIVE))


def can_fuse_batch_norm() -> bool:
    """Returns whether torch's kernels for batch normalization can run here, on a GPU."""
    return _has_batch_norm_kernels() and not internals.ARE_TRANSFORMS_ACTIVE.get()()


def compiler_errors() -> tuple[type[Exception], ...]:
    """Returns the classes of what torch raises for code that it cannot compile."""
    error = internals.COMPILER_ERROR
    return (error.get(),) if error.is_there() else ()


Run = Callable[[Any, Sequence[Any], Mapping[str, Any]], object]


def intercept(run: Run) -> AbstractContextManager[object]:
    """Returns a context in which ``run(operation, args, kwargs)`` runs each operation of torch."""
    return _interceptor()(run)


@functools.cache
def _interceptor() -> type[Any]:
    class Interceptor(internals.DISPATCH_MODE.get()):
        def __init__(self, run: Run) -> None:
            super().__init__()
            self.run = run

        def __torch_dispatch__(
            self, func: object, types: object, args: Any = (), kwargs: Any = None
        ) -> object:
            return self.run(func, args, kwargs or {})

    return Interceptor


def list_parameters(operation: Callable[..., object]) -> list[str]:
    """Returns the names of the parameters of an operation of torch, in their order."""
    [signature] = internals.LIST_SIGNATURES.get()(operation)
    return [*signature.parameters]
