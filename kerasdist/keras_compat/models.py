"""Keras's models, layers, losses, metrics and trees, its version, and its state per thread.

That state is settings on which layers and operations depend, and where random draws begin.
"""

from __future__ import annotations

import functools
import random
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import keras
import numpy as np
from keras.src import api_export, tree
from keras.src.backend.common import global_state
from keras.src.export.export_utils import get_input_signature
from keras.src.models.functional import Functional
from keras.src.optimizers.base_optimizer import BaseOptimizer
from keras.src.random.seed_generator import SeedGenerator
from keras.src.saving import object_registration
from keras.src.saving.keras_saveable import KerasSaveable
from keras.src.trainers.compile_utils import CompileLoss
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from keras.src.trainers.trainer import Trainer
from keras.src.tree import tree_api
from keras.src.utils import naming, python_utils
from keras.src.utils.rng_utils import GLOBAL_RANDOM_SEED

from kerasdist.core.structures import flatten

_VERSION = tuple(int(part) for part in keras.__version__.split(".")[:2])


# Keras declares no types, and what is inferred from bodies of functions is wrong.
ops: Any = keras.ops
LayoutMap: Any = keras.distribution.LayoutMap


# Whether a layer divides the penalty on its outputs by their number of rows. True from 3.14 on.
DIVIDES_ACTIVITY_PENALTY = _VERSION >= (3, 14)


# Whether Keras on JAX asks for stacks of batches, where an execution has several steps.
STACKS_BATCHES = _VERSION >= (3, 16)


# Whether Keras itself takes BatchNormalization(synchronized=True) on this backend.
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
    """Returns the callbacks in an argument of `fit`."""
    if isinstance(callbacks, keras.callbacks.CallbackList):
        return callbacks.callbacks
    return keras.tree.flatten(callbacks) if callbacks else []


def is_orbax_checkpoint(callback: keras.callbacks.Callback) -> bool:
    """Returns whether a callback is Keras's OrbaxCheckpoint, which 3.12 has not."""
    kind: type | None = vars(keras.callbacks).get("OrbaxCheckpoint")
    return kind is not None and isinstance(callback, kind)


def overrides(callback: keras.callbacks.Callback, events: Iterable[str]) -> bool:
    """Returns whether a callback overrides one of Keras's events, which do nothing."""
    return any(not python_utils.is_default(getattr(callback, event)) for event in events)


def metrics_here(model: Any) -> dict[str, Any]:
    """Returns what a model's metrics say, without a sum over processes."""
    return Trainer.get_metrics_result(model)


def model_of(callback: Any) -> Any:
    """Returns the model of a callback; reading ``callback.model`` would copy its state on JAX."""
    return callback._model


def choose_comparison(callback: keras.callbacks.ModelCheckpoint) -> None:
    """Lets a callback know which of two values is better, which Keras does at an epoch's end."""
    with suppress(ValueError):  # its metric is not built yet
        callback._set_monitor_op()


def shapes_of_example(model: keras.Model) -> list[object]:
    """Returns the arguments of a built model's call, as Keras tensors of one example."""

    def of_one(spec: keras.KerasTensor) -> keras.KerasTensor:
        return keras.KerasTensor((1, *spec.shape[1:]), spec.dtype)

    return [keras.tree.map_structure(of_one, each) for each in get_input_signature(model) or ()]


def flat_layers(model: keras.Model) -> list[Any]:
    """Returns a model's layers, layers inside of layers too."""
    return list(model._flatten_layers(include_self=False))


def layers_of_users(model: keras.Model) -> list[Any]:
    """Returns a model and its layers as far as their classes are not Keras's own."""
    layers = [model, *flat_layers(model)]
    return [layer for layer in layers if not is_builtin(type(layer))]


def trainable_layers(model: keras.Model) -> list[bool]:
    """Returns which of a model's layers are trained."""
    return [one.trainable for one in flat_layers(model)]


def attached_metrics(model: keras.Model) -> list[Any]:
    """Returns the metrics of a model and its layers, those that its `metrics` leaves out, too."""
    attached = [metric for one in (model, *flat_layers(model)) for metric in one._metrics]
    return list(dict.fromkeys((*model.metrics, *attached)))


def is_default_name(name: str, kind: type) -> bool:
    """Returns whether Keras has named an object, by its class and a number."""
    default, _, number = name.rpartition("_")
    known = (_snake_case(kind.__name__), "functional", "model")
    return name in known or (default in known and number.isdecimal())


_snake_case = functools.cache(naming.to_snake_case)


def is_wired(model: keras.Model) -> bool:
    """Returns whether a model is Functional or Sequential."""
    return isinstance(model, Functional | keras.Sequential)


def wiring(model: keras.Model) -> list[tuple[Any, list[Any]]]:
    """Returns the operations of a Functional model, and the arguments of each of their calls.

    An argument is the number of the operation that it comes from, of its call, and of its output;
    or the argument itself, if it is a constant. Empty for any other model.
    """
    if not isinstance(model, Functional):
        return []
    mine = {id(node) for nodes in model._nodes_by_depth.values() for node in nodes}
    numbers = {id(one): number for number, one in enumerate(model.operations)}

    def calls(operation: Any) -> list[Any]:
        return [node for node in operation._inbound_nodes if id(node) in mine]

    def origin(argument: object) -> Any:
        if not isinstance(argument, keras.KerasTensor):
            return argument
        history: Any = vars(argument)["_keras_history"]
        nodes = calls(history.operation)
        node = history.operation._inbound_nodes[history.node_index]
        number = numbers.get(id(history.operation), -1)
        call = next((at for at, one in enumerate(nodes) if one is node), -1)
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


def is_in_layer() -> bool:
    """Returns whether this thread is in the call of a layer, or of a model."""
    return global_state.get_global_attribute("current_call_ctx") is not None


def is_of_optimizer() -> bool:
    """Returns whether a variable that this thread makes now is an optimizer's."""
    scopes = global_state.get_global_attribute("name_scope_stack")
    return bool(scopes) and isinstance(scopes[-1].caller, BaseOptimizer)


def is_symbolic() -> bool:
    """Returns whether this thread computes shapes alone; on PyTorch only."""
    return global_state.get_global_attribute("torch_device") == "meta"


def backend_name() -> str:
    """Returns the name of the framework that Keras runs on."""
    return keras.config.backend()


def is_builtin(function_or_class: object) -> bool:
    """Returns whether Keras ships this function or class."""
    module = getattr(function_or_class, "__module__", None) or ""
    # Keras's own tests count as user code.
    return module.partition(".")[0] == "keras" and not module.endswith("_test")


def mixes_examples(function: Any, arguments: Mapping[str, Any], y_pred: object) -> bool:
    """Returns whether a loss or metric that Keras ships mixes the examples of predictions."""
    name = getattr(function, "__name__", "")
    if name not in _AXES or not is_builtin(function):
        return False
    axes = arguments.get("axis", _AXES[name])
    ranks = [len(one.shape) for one in keras.tree.flatten(y_pred)]
    return axes is None or any(
        axis % rank == 0 for axis in keras.tree.flatten(axes) for rank in ranks
    )


# Functions that compute one value over some axes of a batch, which may be those of the examples:
# over these by default, None for all.
_AXES = {
    "circle": None,
    "concordance_correlation": -1,
    "cosine_similarity": -1,
    "dice": None,
    "pearson_correlation": -1,
    "tversky": None,
}


def serialize_as(own: type, stand_in: type) -> None:
    """Lets objects of a class be saved and pickled as those of another."""
    for names in (object_registration.GLOBAL_CUSTOM_NAMES, api_export.REGISTERED_OBJS_TO_NAMES):
        if own in names:
            names[stand_in] = names[own]
    if issubclass(own, KerasSaveable):
        stand_in._unpickle_model = own._unpickle_model


def copy_thread_state() -> dict[str, Any]:
    """Returns Keras's state of the calling thread: scopes, policies, the device."""
    return dict(vars(global_state.GLOBAL_STATE_TRACKER))


def paste_thread_state(state: dict[str, Any]) -> None:
    """Sets Keras's state of the calling thread to that of another one."""
    here = vars(global_state.GLOBAL_STATE_TRACKER)
    here.clear()
    # Stacks, such as that of name scopes, are copied for each thread.
    here.update({key: list(v) if isinstance(v, list) else v for key, v in state.items()})


def parts_of(model: keras.Model) -> list[Any]:
    """Returns a model and all objects that hold its variables."""
    return [model, *flat_layers(model), *optimizers_of(model), *model.metrics]


def optimizers_of(model: keras.Model) -> list[keras.Optimizer]:
    """Returns the optimizers that a model and its layers hold."""
    return held_by(model, keras.Optimizer)


def held_by(model: keras.Model, kind: type[Any]) -> list[Any]:
    """Returns what a model and its layers hold of a kind: alone, in lists, dicts, objects."""
    found: list[Any] = []
    seen: set[int] = set()

    def look_into(value: Any, depth: int) -> None:
        if id(value) in seen:
            return
        seen.add(id(value))
        if isinstance(value, kind):
            found.append(value)
        elif isinstance(value, dict | list | tuple):
            for each in list(value.values() if isinstance(value, dict) else value):
                look_into(each, depth)
        elif depth and is_of_user(type(value)):
            look_into(getattr(value, "__dict__", None), depth - 1)

    for one in (model, *flat_layers(model)):
        look_into(vars(one), _DEPTH)
    return found


_DEPTH = 3


# Packages whose versions workers compare, in place of their code.
_PACKAGES = frozenset(
    {"abc", "builtins", "jax", "keras", "kerasdist", "numpy", "tensorflow", "torch", "typing"}
)


def is_of_user(function_or_class: object) -> bool:
    """Returns whether a function or class belongs to neither Keras, a framework, nor kerasdist."""
    module = getattr(function_or_class, "__module__", None) or "builtins"
    return module.partition(".")[0] not in _PACKAGES


def has_built_layers(model: Any) -> bool:
    """Returns whether all layers inside of a model are built; it may have no ``call`` itself."""
    return all(layer.built for layer in flat_layers(model))


def is_complete(model: keras.Model) -> bool:
    """Returns whether all layers, the losses and the metrics of a compiled model are built."""
    compiled = (model._compile_loss, model._compile_metrics)
    return has_built_layers(model) and all(one is None or one.built for one in compiled)


def drop_compiled(model: Any) -> None:
    """Lets a TensorFlow model compile its steps again."""
    model.train_function = model.test_function = model.predict_function = None


def given_metrics(compiled: Any) -> list[Any]:
    """Returns what ``compile`` got as metrics and weighted metrics, None for an output without."""
    return keras.tree.flatten((compiled._user_metrics, compiled._user_weighted_metrics))


def initial_epoch(model: Any) -> int | None:
    """Returns the epoch with which `fit` begins; None: its argument decides."""
    return model._initial_epoch


def set_initial_epoch(model: Any, epoch: int | None) -> None:
    """Sets the epoch with which `fit` begins; None: its argument decides."""
    model._initial_epoch = epoch


def skip_batches(model: Any, count: int, unread: int, logs: Any, then: Callable[[], None]) -> None:
    """Lets a model's next training steps read their batches and do nothing with them.

    Keras's loop looks up `train_function` for each step. It calls it with the batches on PyTorch,
    with their iterator on TensorFlow, and with its state and the iterator on JAX. The first
    ``unread`` batches are not in an iterator.
    """
    train = model.train_function
    done = 0

    def skip(*arguments: Any) -> Any:
        nonlocal done
        *state, batches = arguments
        begin, done = done, done + model.steps_per_execution
        if not isinstance(batches, list):
            for _ in range(max(begin, unread), done):
                next(batches, None)
        if done >= count:
            model.train_function = train
            then()
        return (logs, *state) if state else logs

    model.train_function = skip


def numbers_of(logs: object) -> dict[str, Any]:
    """Returns the logs of a step as Keras passes them to callbacks."""
    return python_utils.pythonify_logs(logs) if isinstance(logs, dict) else {}


def losses_on(layer: keras.Layer) -> list[Any]:
    """Returns the losses of a layer's last call, as Keras's own list."""
    return layer._losses


def clear_losses_on(layers: Iterable[keras.Layer]) -> None:
    """Removes the losses of the last calls of layers."""
    for layer in layers:
        layer._losses.clear()


def loss_ids_on(layer: keras.Layer) -> set[int]:
    """Returns Keras's set of the ids of a layer's losses in a stateless scope."""
    return layer._loss_ids


def compiled_losses(model: keras.Model) -> Any:
    """Returns the loss of `compile`, in the structure in which it was passed."""
    compiled = getattr(model, "_compile_loss", None)
    return compiled._user_loss if isinstance(compiled, CompileLoss) else None


def compiled_metrics(model: keras.Model) -> list[Any]:
    """Returns the metrics of `compile`, weighted ones too, as they were passed."""
    compiled = getattr(model, "_compile_metrics", None)
    return [] if compiled is None else given_metrics(compiled)


def whole_batch(x: object, y: object, sample_weight: object) -> Any:
    """Returns arrays as one batch of tensors, as Keras's loop passes it to a step."""
    rows = len(next(leaf for leaf in tree.flatten(x) if leaf is not None))
    adapter = ArrayDataAdapter(x, y=y, sample_weight=sample_weight, batch_size=rows, shuffle=False)
    batch = next(iter(adapter.get_numpy_iterator()))
    return tree.map_structure(
        lambda leaf: None if leaf is None else ops.convert_to_tensor(leaf), batch
    )


def seed_states(model: keras.Model) -> list[Any]:
    """Returns the variables that hold the states of a model's seed generators."""
    layers = model._flatten_layers()
    return [generator.state for layer in layers for generator in layer._seed_generators]


# The parts of an object, in order.
Parts = Callable[[Any], Sequence[Any]]


def register_tree_node(kind: type[Any], parts: Parts) -> None:
    """Lets `keras.tree` flatten and rebuild the objects of a class."""
    tree: Any = tree_api.tree_impl  # Keras's module for the tree library that it has chosen
    _REGISTER[tree.__name__.rpartition(".")[2]](tree, kind, parts)


def _by_optree(tree: Any, kind: type[Any], parts: Parts) -> None:
    tree.optree.register_pytree_node(
        kind,
        lambda value: (parts(value), None),
        lambda _, children: kind(tuple(children)),
        namespace="keras",
    )


def _by_torch(tree: Any, kind: type[Any], parts: Parts) -> None:
    torch_tree = tree.torch_tree
    torch_tree.register_pytree_node(
        kind,
        lambda value: (list(parts(value)), None),
        lambda children, _: kind(tuple(children)),
        flatten_with_keys_fn=lambda value: (
            [(torch_tree.SequenceKey(index), part) for index, part in enumerate(parts(value))],
            None,
        ),
    )


# By the name of Keras's module.
_REGISTER: dict[str, Callable[[Any, type[Any], Parts], None]] = {
    "optree_impl": _by_optree,
    "torchtree_impl": _by_torch,
}


_threads_own = global_state.GLOBAL_STATE_TRACKER
_floatx = keras.config.floatx


def settings() -> tuple[str, str, bool]:
    """Returns the settings that a compiled function depends on beside its arguments and variables.

    Every step calls it, so it is fast.
    """
    own = _threads_own
    policy = getattr(own, "dtype_policy", None) or keras.config.dtype_policy()
    return policy.name, _floatx(), getattr(own, "stateless_scope", None) is not None


_GLOBAL_SEED_GENERATOR = "global_seed_generator"


def is_seeded(seed: object) -> bool:
    """Returns whether the user has seeded a draw; else torch's own generator is used."""
    return seed is not None and not (isinstance(seed, SeedGenerator) and seed._initial_seed is None)


def global_seed_generator() -> Any:
    """Returns the generator that unseeded draws of this thread take their seeds from, or None."""
    return global_state.get_global_attribute(_GLOBAL_SEED_GENERATOR)


def set_global_seed_generator(generator: object) -> None:
    """Sets the generator that unseeded draws of this thread take their seeds from."""
    global_state.set_global_attribute(_GLOBAL_SEED_GENERATOR, generator)


def global_seed() -> int | None:
    """Returns what ``keras.utils.set_random_seed`` was called with last, None if it was not."""
    return global_state.get_global_attribute(GLOBAL_RANDOM_SEED)


def set_random_seed(number: int) -> None:
    """Does what `keras.utils.set_random_seed` does, which imports TensorFlow to seed it.

    That would cost each worker on other frameworks 420 MB.
    """
    if "tensorflow" in sys.modules:
        keras.utils.set_random_seed(number)
        return
    global_state.set_global_attribute(GLOBAL_RANDOM_SEED, number)
    set_global_seed_generator(None)
    random.seed(number)
    np.random.seed(number)
