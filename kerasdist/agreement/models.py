"""What a model computes: layers, wiring, optimizers, and the arguments of `compile`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras

from kerasdist import keras_compat
from kerasdist.agreement.description import configuration, described

# The attribute for the arguments of `compile`; set without Keras's tracking.
_COMPILED = "_kerasdist_compiled"

# The attribute for the facts that workers have compared since `compile`.
_COMPARED = "_kerasdist_compared"


def record_compile(model: Any, given: Mapping[str, Any]) -> None:
    """Keeps the arguments of `compile` on the model."""
    facts = {name: described(value) for name, value in given.items() if name != "optimizer"}
    object.__setattr__(model, _COMPILED, facts)
    object.__setattr__(model, _COMPARED, None)


def is_compared(model: Any) -> bool:
    """Returns whether workers have compared the model since it was compiled."""
    return vars(model).get(_COMPARED) is not None


def facts_of(model: Any, *, anew: bool) -> dict[str, Any]:
    """Returns what must be equal on all workers."""
    known = vars(model).get(_COMPARED)
    return _facts(model) if known is None or anew else known


def mark_compared(model: Any, facts: Mapping[str, Any]) -> None:
    """Records that all workers have compared the model, and found it equal."""
    object.__setattr__(model, _COMPARED, facts)


def _facts(model: Any) -> dict[str, Any]:
    layers = keras_compat.flat_layers(model)
    classes = frozenset(type(layer).__name__ for layer in layers)
    wirings = [_wiring(one) for one in (model, *layers)]
    own = configuration(model, classes)
    return {
        "model": _named(model),
        **{name: facts for name, facts in own.items() if name != "class" and facts},
        "layers": [_of_layer(layer, classes) for layer in layers],
        "wiring": [wires for wires in wirings if wires],
        **_attributes(model),
        "compile": vars(model).get(_COMPILED, {}),
    }


def _of_layer(layer: Any, classes: frozenset[str]) -> dict[str, Any]:
    facts = {**configuration(layer, classes), "class": _named(layer)}
    return {"trainable": layer.trainable, **facts}


def _wiring(model: Any) -> list[Any]:
    return [_of_call(*one) for one in keras_compat.wiring(model)]


def _of_call(operation: Any, calls: list[Any]) -> Any:
    is_layer = isinstance(operation, keras.Layer)
    facts = {"class": _named(operation)} if is_layer else configuration(operation)
    return {**facts, "calls": described(calls)}


def _named(one: Any) -> str:
    """Returns an object's class, and its name if the user has chosen one."""
    kind = type(one)
    own = not keras_compat.is_default_name(one.name, kind)
    return f"{kind.__name__} {one.name!r}" if own else kind.__name__


def _attributes(model: Any) -> dict[str, Any]:
    """Returns the optimizers and losses that a model keeps, for its own `train_step` or Keras's."""
    facts: dict[str, Any] = {}
    for name, value in vars(model).items():
        if name.startswith("_"):
            continue
        if isinstance(value, keras.optimizers.Optimizer | keras.losses.Loss):
            facts[name] = configuration(value)
    return facts
