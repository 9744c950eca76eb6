"""Masks, the reductions of losses, the metrics of `compile`, and the scope of stateless calls."""

from __future__ import annotations

import inspect
from typing import Any, final

from kerasdist.keras_compat import internals
from kerasdist.keras_compat.models import is_builtin


def get_stateless_scope() -> Any:
    """Returns the `keras.StatelessScope` in which this thread is, None if it is in none."""
    return internals.STATELESS_SCOPE.get()()


def get_keras_mask(tensor: Any) -> Any:
    """Returns the mask that Keras keeps for a tensor, None if there is none."""
    return internals.GET_MASK.get()(tensor)


def set_keras_mask(tensor: Any, mask: Any) -> None:
    """Sets the mask that Keras keeps for a tensor."""
    internals.SET_MASK.get()(tensor, mask)


def apply_mask(sample_weight: Any, mask: Any, *, dtype: Any, reduction: str) -> Any:
    """Returns weights that are zero where a mask is, by Keras's own function, unpatched."""
    keras_own = inspect.unwrap(internals.APPLY_MASK.get())
    return keras_own(sample_weight, mask, dtype=dtype, reduction=reduction)


def reduce_values(values: Any, sample_weight: Any, reduction: str | None) -> Any:
    """Reduces the values of a loss, as Keras does."""
    return internals.REDUCE_VALUES.get()(values, sample_weight, reduction)


class _TypeOfCompileMetrics(type):
    def __instancecheck__(cls, instance: object) -> bool:
        # No other metric that Keras ships, and that a model has, has metrics.
        return is_builtin(type(instance)) and hasattr(instance, "metrics")


@final
class CompileMetrics(metaclass=_TypeOfCompileMetrics):
    """The class of the metric that holds those of `compile`, for `isinstance`."""

    built: bool
    metrics: Any
