"""Which variables are an optimizer's, and the weights to which they belong."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import Any, final

from kerasdist import keras_compat
from kerasdist.core.ownership import VariableTable

# An optimizer's variable, and the weight that it belongs to; itself, if it belongs to none.
_weights: VariableTable[Any] = VariableTable()


@final
class _Making(threading.local):
    """Whether an optimizer makes a variable in this thread, and for which weight."""

    is_on: bool = False
    weight: Any = None


_making = _Making()


def install() -> None:
    """Installs the hooks where optimizers make variables."""
    keras_compat.install(slot=_from_weight, slot_alone=_alone)


def _from_weight(
    original: Callable[..., Any],
    optimizer: Any,
    reference_variable: Any,  # Keras's name, by which some optimizers pass it
    *args: Any,
    **kwargs: Any,
) -> Any:
    with _made_for(reference_variable):
        return original(optimizer, reference_variable, *args, **kwargs)


def _alone(original: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    with _made_for(_making.weight):
        return original(optimizer, *args, **kwargs)


@contextmanager
def _made_for(weight: Any) -> Generator[None]:
    before = _making.is_on, _making.weight
    _making.is_on, _making.weight = True, weight
    try:
        yield
    finally:
        _making.is_on, _making.weight = before


def note_new(variable: Any) -> None:
    """Notes a variable that is about to be made, if an optimizer makes it."""
    if _making.is_on:
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
