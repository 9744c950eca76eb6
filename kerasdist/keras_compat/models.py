"""Helpers for Keras's models, layers, callbacks and trees, and facts about Keras's version."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

import keras

from kerasdist.core.structures import flatten
from kerasdist.keras_compat import internals

VERSION = tuple(int(part) for part in keras.__version__.split(".")[:2])


# These names have the type Any, because Keras declares no types, and the types that a type checker
# infers from Keras's functions are wrong.
ops: Any = keras.ops
LayoutMap: Any = keras.distribution.LayoutMap


# Whether Keras divides a layer's activity penalty by the number of rows, as it does from 3.14 on.
DIVIDES_ACTIVITY_PENALTY = VERSION >= (3, 14)


# Whether Keras on JAX reads stacks of batches if `steps_per_execution` is more than 1.
STACKS_BATCHES = VERSION >= (3, 16)


# Whether Keras itself accepts BatchNormalization(synchronized=True) on this backend.
KNOWS_SYNCHRONIZED = keras.config.backend() == "tensorflow"


# The events that Keras's callbacks get for each batch.
TRAIN_BATCH_EVENTS = (
    "on_batch_begin",
    "on_batch_end",
    "on_train_batch_begin",
    "on_train_batch_end",
)
BATCH_EVENTS = (*TRAIN_BATCH_EVENTS, "on_test_batch_begin", "on_test_batch_end")


def callbacks_of(callbacks: object) -> list[Any]:
    """Returns the callbacks in the argument `callbacks` of `fit`."""
    if isinstance(callbacks, keras.callbacks.CallbackList):
        return callbacks.callbacks
    return keras.tree.flatten(callbacks) if callbacks else []


def is_orbax_checkpoint(callback: keras.callbacks.Callback) -> bool:
    """Returns whether a callback is Keras's OrbaxCheckpoint, which Keras 3.12 does not have."""
    kind: type | None = vars(keras.callbacks).get("OrbaxCheckpoint")
    return kind is not None and isinstance(callback, kind)


def overrides(callback: keras.callbacks.Callback, events: Iterable[str]) -> bool:
    """Returns whether a callback overrides one of the methods `events` of Keras's base class."""
    base = keras.callbacks.Callback
    methods = ((getattr(callback, event), getattr(base, event)) for event in events)
    return any(getattr(own, "__func__", own) is not inherited for own, inherited in methods)


_RESULT = "get_metrics_result"
metrics_here: Any = next(
    vars(kind)[_RESULT] for kind in reversed(keras.Model.__mro__) if _RESULT in vars(kind)
)
"""Returns the results of a model's metrics, without a sum over processes.

This is the method `get_metrics_result` of the base class of all trainers. In the trainer class of
Keras's backend, a method of this name sums over processes.
"""


def model_of(callback: Any) -> Any:
    """Returns the model of a callback. On JAX ``callback.model`` would copy the model's state."""
    name = internals.CALLBACK_MODEL.attribute
    return getattr(callback, name) if hasattr(callback, name) else callback.model


def choose_comparison(callback: keras.callbacks.ModelCheckpoint) -> None:
    """Lets a ModelCheckpoint choose whether a smaller or a larger metric is better.

    Keras lets the callback choose only at the end of an epoch.
    """
    choose = internals.CHOOSE_COMPARISON.of(callback)
    with suppress(ValueError):  # the metric is not built yet
        choose()


def shapes_of_example(model: keras.Model) -> list[object]:
    """Returns the arguments of a built model's call, as Keras tensors for one example."""

    def of_one(spec: keras.KerasTensor) -> keras.KerasTensor:
        return keras.KerasTensor((1, *spec.shape[1:]), spec.dtype)

    signature = internals.INPUT_SIGNATURE.value(model)
    return [keras.tree.map_structure(of_one, each) for each in signature or ()]


def flat_layers(model: keras.Layer) -> list[Any]:
    """Returns a model's layers, including layers inside of layers."""
    flattened = getattr(model, internals.FLATTEN_LAYERS.attribute, None)
    return _walk_layers(model) if flattened is None else flattened(include_self=False)


def _walk_layers(model: Any) -> list[Any]:
    """Returns the same layers as Keras's `_flatten_layers`, but finds them by public attributes."""
    found: dict[int, Any] = {}
    waiting = _layers_in(model)
    while waiting:
        layer = waiting.pop(0)
        if id(layer) not in found:
            found[id(layer)] = layer
            waiting[:0] = reversed(_layers_in(layer))
    return list(found.values())


def _layers_in(layer: Any) -> list[Any]:
    if isinstance(layer, keras.Sequential):
        return layer.layers  # its inner Functional model, which has the same layers, is left out
    own = getattr(layer, "layers", ()) if isinstance(layer, keras.Function) else ()
    return list({id(one): one for one in (*own, *_held_in((layer,), keras.Layer))}.values())


def trainable_layers(model: keras.Model) -> list[bool]:
    """Returns, for each layer of a model, whether the layer is trainable."""
    return [one.trainable for one in flat_layers(model)]


def attached_metrics(model: keras.Model) -> list[Any]:
    """Returns the metrics of a model and its layers, even those that `model.metrics` leaves out."""
    attached = [metric for one in (model, *flat_layers(model)) for metric in _metrics_of(one)]
    return list(dict.fromkeys((*model.metrics, *attached)))


def _metrics_of(layer: Any) -> Iterable[Any]:
    own = getattr(layer, internals.METRICS.attribute, None)
    return _held_in((layer,), keras.metrics.Metric) if own is None else own


def is_default_name(name: str, kind: type) -> bool:
    """Returns whether Keras has chosen an object's name, from its class and a number."""
    default = re.sub(r"_\d+$", "", name)
    known = (_letters(kind.__name__), "functional", "model")
    return _letters(name) in known or _letters(default) in known


def _letters(name: str) -> str:
    """Returns a name in lower case, without underscores or other separators."""
    return re.sub(r"[\W_]", "", name).lower()


def wiring(model: Any) -> list[tuple[Any, list[Any]]]:
    """Returns the operations of a Functional model, and the arguments of each of their calls.

    A constant argument is returned as it is. A tensor is returned as three numbers: the number of
    the operation that made the tensor, the number of this operation's call, and the number of the
    call's output. The list is empty for a model that is not Functional.
    """
    known = internals.NODES.is_there() and internals.HISTORY.is_there()
    if not known or not isinstance(model, keras.Function):
        return []
    mine = _nodes_of(model)
    numbers = {id(one): number for number, one in enumerate(model.operations)}

    def calls(operation: Any) -> list[Any]:
        return [node for node in internals.NODES.of(operation) if id(node) in mine]

    def origin(argument: object) -> Any:
        if not isinstance(argument, keras.KerasTensor):
            return argument
        history, made = _made(argument)
        number = numbers.get(id(history.operation), -1)
        nodes = calls(history.operation)
        call = next((at for at, one in enumerate(nodes) if one is made), -1)
        return [number, call, history.tensor_index]

    return [
        (
            operation,
            [
                [origin(one) for one in flatten((node.arguments.args, kwargs))]
                for node in calls(operation)
                for kwargs in [node.arguments.kwargs]
            ],
        )
        for operation in model.operations
    ]


def _made(tensor: keras.KerasTensor) -> tuple[Any, Any]:
    """Returns the `KerasHistory` of a tensor, and the node of the call that made the tensor."""
    history = internals.HISTORY.of(tensor)
    return history, internals.NODES.of(history.operation)[history.node_index]


def value_of(tensor: keras.KerasTensor, variable_of: Callable[[keras.KerasTensor], Any]) -> Any:
    """Computes the value of a symbolic tensor.

    Symbolic inputs stand for variables: `variable_of` returns the variable of such an input.
    """
    history = getattr(tensor, internals.HISTORY.attribute, None)
    if history is None or history.operation is None:
        return keras.ops.convert_to_numpy(variable_of(tensor))
    _, node = _made(tensor)
    given = {id(one): value_of(one, variable_of) for one in node.arguments.keras_tensors}
    args, kwargs = node.arguments.fill_in(given)
    return flatten(history.operation(*args, **kwargs))[history.tensor_index]


def _nodes_of(model: Any) -> set[int]:
    """Returns the ids of a model's nodes: those on the way from its outputs back to its inputs."""
    found: set[int] = set()
    inputs = set(map(id, keras.tree.flatten(model.inputs)))
    waiting = [*keras.tree.flatten(model.outputs), *keras.tree.flatten(model.inputs)]
    while waiting:
        tensor = waiting.pop()
        _, node = _made(tensor)
        if id(node) in found:
            continue
        found.add(id(node))
        if id(tensor) not in inputs:
            waiting += node.arguments.keras_tensors
    return found


def backend_name() -> str:
    """Returns the name of the framework that Keras runs on."""
    return keras.config.backend()


def is_builtin(function_or_class: object) -> bool:
    """Returns whether a function or class belongs to Keras."""
    module = getattr(function_or_class, "__module__", None) or ""
    # Code in Keras's own tests counts as user code.
    return module.partition(".")[0] == "keras" and not module.endswith("_test")


def mixes_examples(function: Any, arguments: Mapping[str, Any], y_pred: object) -> bool:
    """Returns whether a loss or metric of Keras computes a value from several examples together."""
    name = getattr(function, "__name__", "")
    if name not in _AXES or not is_builtin(function):
        return False
    axes = arguments.get("axis", _AXES[name])
    ranks = [len(one.shape) for one in keras.tree.flatten(y_pred)]
    return axes is None or any(
        axis % rank == 0 for axis in keras.tree.flatten(axes) for rank in ranks
    )


# Keras's losses and metrics that compute one value over some axes, which may include the axis of
# examples. The dictionary has the default axes of each function; None means all axes.
_AXES = {
    "circle": None,
    "concordance_correlation": -1,
    "cosine_similarity": -1,
    "dice": None,
    "pearson_correlation": -1,
    "tversky": None,
}

MIXING = frozenset(_AXES)
"""The names of Keras's loss and metric functions that may mix examples."""


def parts_of(model: keras.Model) -> list[Any]:
    """Returns a model and all objects that hold its variables."""
    return [model, *flat_layers(model), *optimizers_of(model), *model.metrics]


def optimizers_of(model: keras.Model) -> list[keras.Optimizer]:
    """Returns the optimizers that a model and its layers hold."""
    return held_by(model, keras.Optimizer)


def held_by(model: keras.Model, kind: type[Any]) -> list[Any]:
    """Returns the objects of a class that are attributes of a model or of one of its layers.

    Lists, dictionaries, tuples and sets in these attributes are searched too.
    """
    return _held_in((model, *flat_layers(model)), kind, _DEPTH)


def _held_in(owners: Iterable[Any], kind: type[Any], depth: int = 0) -> list[Any]:
    """Returns the objects of a class in the owners' attributes, or in collections in these.

    If an attribute is an object of a user's class, the attributes of this object are searched too.
    The search follows at most `depth` such objects, one inside the other.
    """
    found: list[Any] = []
    seen: set[int] = set()

    def look_into(value: Any, depth: int) -> None:
        if id(value) in seen:
            return
        seen.add(id(value))
        if isinstance(value, kind):
            found.append(value)
        elif isinstance(value, dict | list | tuple | set | frozenset):
            for each in list(value.values() if isinstance(value, dict) else value):
                look_into(each, depth)
        elif depth and is_of_user(type(value)):
            look_into(getattr(value, "__dict__", None), depth - 1)

    for one in owners:
        look_into(vars(one), depth)
    return found


_DEPTH = 3


# Functions and classes of these packages do not count as a user's. Workers compare the versions of
# the packages, but not their code.
PACKAGES = frozenset(
    {"abc", "builtins", "jax", "keras", "kerasdist", "numpy", "tensorflow", "torch", "typing"}
)


def is_of_user(function_or_class: object) -> bool:
    """Returns whether a function or class is a user's: defined in none of the `PACKAGES`."""
    module = getattr(function_or_class, "__module__", None) or "builtins"
    return module.partition(".")[0] not in PACKAGES


def has_built_layers(model: Any) -> bool:
    """Returns whether all layers inside of a model are built; the model itself may be unbuilt."""
    return all(layer.built for layer in flat_layers(model))


def require_built(model: keras.Model) -> None:
    """Refuses a model that has no variables yet."""
    if not model.built:
        raise ValueError(
            f"Expected a built model. Received: model={model.name!r}, which has no variables yet. "
            "Give it an Input, call it once, or call model.build."
        )


def is_complete(model: Any) -> bool:
    """Returns whether all layers, the losses and the metrics of a compiled model are built."""
    names = internals.COMPILED_LOSS.attribute, internals.COMPILED_METRICS.attribute
    compiled = (getattr(model, name, None) for name in names)
    return has_built_layers(model) and all(one is None or one.built for one in compiled)


def require_losses_of_layers() -> None:
    """Raises a `VersionError` if Keras lacks an internal that `add_loss` in replicas needs."""
    internals.LOSSES.require()
    internals.CLEAR_LOSSES.require()
    if backend_name() == "jax":
        internals.LOSS_IDS.require()


def loss_ids_on(layer: Any) -> set[int]:
    """Returns Keras's set of the ids of a layer's losses in a stateless scope.

    If this version of Keras has no such set, the result is an empty set. In that case
    `require_losses_of_layers` refuses `add_loss`.
    """
    return getattr(layer, internals.LOSS_IDS.attribute, set())


def is_of_examples(metric: Any) -> bool:
    """Returns whether a metric belongs to a Keras class that computes a value for each example.

    The class's name decides, because this function is also called while the metric's constructor
    runs, before the constructor has stored the metric's function.
    """
    kind = type(metric)
    letters = {name.replace("_", "") for name in _AXES}
    is_known = is_builtin(kind) and kind is not keras.metrics.MeanMetricWrapper
    return is_known and kind.__name__.lower() not in letters


def whole_batch(x: object, y: object, sample_weight: object) -> Any:
    """Returns arrays as one batch of tensors, in the form in which Keras passes it to a step."""
    rows = len(next(leaf for leaf in keras.tree.flatten(x) if leaf is not None))
    make = internals.GET_DATA_ADAPTER.value
    adapter = make(x, y, sample_weight=sample_weight, batch_size=rows, shuffle=False)
    batch = next(iter(adapter.get_numpy_iterator()))
    return keras.tree.map_structure(
        lambda leaf: None if leaf is None else ops.convert_to_tensor(leaf), batch
    )


def seed_states(model: keras.Model) -> list[Any]:
    """Returns the variables that hold the states of a model's seed generators."""
    return [generator.state for generator in held_by(model, keras.random.SeedGenerator)]


@functools.cache
def require_scaling(*, in_fit: bool) -> None:
    """Raises a `VersionError` if Keras lacks the functions that scale losses for replicas.

    On TensorFlow, these functions of Keras divide a loss by the number of replicas, which kerasdist
    must prevent in `fit`. On other backends, kerasdist replaces the functions so that they divide
    the loss in custom loops.
    """
    if backend_name() == "tensorflow":
        internals.SCALE_LOSS_IN_FIT.require()
        internals.UNSCALE_LOSS_IN_FIT.require()
    elif not in_fit:
        internals.SCALE_LOSS.require()
        internals.UNSCALE_LOSS.require()


def register_tree_node(kind: type[Any]) -> None:
    """Lets `keras.tree` flatten and rebuild objects of a class.

    The attribute `values` of an object has the object's leaves.
    """
    # Keras has a module for each tree library. `tree` is the module for the library in use.
    tree: Any = internals.TREE.value if internals.TREE.is_there() else None
    if hasattr(tree, "torch_tree"):
        torch_tree = tree.torch_tree
        torch_tree.register_pytree_node(
            kind,
            lambda value: (list(value.values), None),
            lambda children, _: kind(tuple(children)),
            flatten_with_keys_fn=lambda value: (
                [(torch_tree.SequenceKey(index), one) for index, one in enumerate(value.values)],
                None,
            ),
        )
    elif hasattr(tree, "optree"):
        tree.optree.register_pytree_node(
            kind,
            lambda value: (value.values, None),
            lambda _, children: kind(tuple(children)),
            namespace="keras",
        )


# The following functions are for masks and for the reductions of losses.


def get_keras_mask(tensor: Any) -> Any:
    """Returns the mask that Keras keeps for a tensor, None if there is none."""
    return internals.GET_MASK.value(tensor)


def set_keras_mask(tensor: Any, mask: Any) -> None:
    """Sets the mask that Keras keeps for a tensor."""
    internals.SET_MASK.value(tensor, mask)


def keep_keras_mask(before: Any, after: Any, change: Callable[[Any], Any] | None = None) -> Any:
    """Gives the tensor `after` the mask of `before`, changed by `change`, and returns `after`."""
    mask = get_keras_mask(before)
    if mask is not None:
        set_keras_mask(after, mask if change is None else change(mask))
    return after


def apply_mask(sample_weight: Any, mask: Any, *, dtype: Any, reduction: str) -> Any:
    """Applies a mask to sample weights by Keras's own function, without kerasdist's patches."""
    keras_own = inspect.unwrap(internals.APPLY_MASK.value)
    return keras_own(sample_weight, mask, dtype=dtype, reduction=reduction)


def is_compile_metrics(metric: object) -> bool:
    """Returns whether a metric is the container in which Keras keeps the metrics of `compile`."""
    # Of Keras's metrics that `model.metrics` may contain, only this one has an attribute `metrics`.
    return is_builtin(type(metric)) and hasattr(metric, "metrics")
