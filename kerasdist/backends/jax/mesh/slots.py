"""Which variables are an optimizer's, and the weights to which they belong."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any, final

from kerasdist import keras_compat
from kerasdist.core.ownership import VariableTable

# An optimizer's variable, and the weight that it belongs to; itself, if it belongs to none.
_weights: VariableTable[Any] = VariableTable()


@final
class _Making(threading.local):
    """The weight for which an optimizer makes a variable in this thread."""

    weight: Any = None


_making = _Making()


def install() -> None:
    """Installs the hook where optimizers make variables for weights."""
    keras_compat.install(slot=_from_weight)


def _from_weight(
    original: Callable[..., Any],
    optimizer: Any,
    reference_variable: Any,  # Keras's name, by which some optimizers pass it
    *args: Any,
    **kwargs: Any,
) -> Any:
    before, _making.weight = _making.weight, reference_variable
    try:
        return original(optimizer, reference_variable, *args, **kwargs)
    finally:
        _making.weight = before


def note_new(variable: Any) -> None:
    """Notes a variable that is about to be made, if an optimizer makes it."""
    if keras_compat.is_of_optimizer():
        _note(variable, _making.weight)


def note_all(optimizer: Any, weights: Iterable[Any]) -> None:
    """Notes the variables of an optimizer that was built before the first strategy was made."""
    unknown = [one for one in optimizer.variables if not is_slot(one)]
    if unknown:
        owners = keras_compat.referenced_variables(optimizer, weights)
        for variable, weight in zip(optimizer.variables, owners, strict=True):
            if not is_slot(variable):
                _note(variable, weight)


def _note(variable: Any, weight: Any) -> None:
    # No entry refers to its own variable, which could never be collected then.
    _weights.put(variable, (None if weight is variable else weight,))


def is_slot(variable: Any) -> bool:
    """Returns whether a variable belongs to an optimizer."""
    return _weights.get(variable) is not None


def weight_of(variable: Any) -> Any:
    """Returns the weight that an optimizer's variable belongs to; else the variable itself."""
    known = _weights.get(variable)
    return variable if known is None or known[0] is None else known[0]
