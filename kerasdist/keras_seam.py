"""The only file that touches Keras's private parts.

Two things stand here: the places where kerasdist steps into Keras (`Hooks`, put in by `install`),
and the few private functions it calls. Each is watched by a test in
``tests/unit/test_keras_seam.py`` that fails when Keras moves it. A hook does nothing but call
Keras's own code for a model that no strategy made and for code that is not a replica's (contract
C3).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import keras
from keras.src import api_export, backend
from keras.src.backend.common import global_state
from keras.src.layers.layer import Layer
from keras.src.layers.rnn.dropout_rnn_cell import DropoutRNNCell
from keras.src.losses import loss as loss_module
from keras.src.losses.loss import apply_mask
from keras.src.models.model import Trainer as BackendTrainer
from keras.src.optimizers.base_optimizer import BaseOptimizer
from keras.src.random.seed_generator import SeedGenerator
from keras.src.saving import object_registration
from keras.src.saving.keras_saveable import KerasSaveable
from keras.src.trainers import data_adapters
from keras.src.trainers.compile_utils import CompileMetrics
from keras.src.trainers.data_adapters import array_slicing
from keras.src.trainers.data_adapters.data_adapter import DataAdapter
from keras.src.trainers.data_adapters.data_adapter_utils import unpack_x_y_sample_weight
from keras.src.trainers.data_adapters.generator_data_adapter import GeneratorDataAdapter
from keras.src.trainers.trainer import Trainer

__all__ = [
    "DIVIDES_ACTIVITY_PENALTY",
    "BackendTrainer",
    "BaseOptimizer",
    "CompileMetrics",
    "DataAdapter",
    "GeneratorDataAdapter",
    "Hooks",
    "Layer",
    "LossScaleOptimizer",
    "Trainer",
    "adopt_optimizer",
    "apply_combined_gradients",
    "apply_mask",
    "apply_scaled_gradients",
    "backend_name",
    "batches",
    "change_aggregation",
    "computes_on_gradients",
    "copy_thread_state",
    "flat_layers",
    "get_data_adapter",
    "global_seed_generator",
    "initialize_waiting_variable",
    "initialize_waiting_variables",
    "install",
    "install_apply_mask",
    "install_dropout",
    "install_in_build",
    "install_in_variables",
    "install_reads",
    "install_scaled_apply",
    "install_scope_reads",
    "is_dataset",
    "is_kerass_own",
    "is_native_dataset",
    "is_seeded",
    "keeps_or_mixes_draws",
    "loss_tracker",
    "make_anew",
    "multiply_initializer",
    "ops",
    "optimized_variables",
    "outside_stateless_scopes",
    "paste_thread_state",
    "referenced_variables",
    "save_as",
    "set_global_seed_generator",
    "spec_of_rows",
    "stateless_scope",
    "store_value",
    "stored_dtype",
    "stored_value",
    "train_validation_split",
    "unpack_x_y_sample_weight",
]

LossScaleOptimizer = keras.optimizers.LossScaleOptimizer
get_data_adapter = data_adapters.get_data_adapter

_VERSION = tuple(int(part) for part in keras.__version__.split(".")[:2])

# Where Keras keeps a thread's state. For the second it has a constant itself from 3.13 on.
_STATELESS_SCOPE = "stateless_scope"
_GLOBAL_SEED_GENERATOR = "global_seed_generator"
_UNINITIALIZED = "uninitialized_variables"

# Where the layers stand that drop units or add noise, by draws of their replica's own.
_NOISE = "keras.src.layers.regularization."

# Keras declares no types for its operations, and what is inferred from their bodies is wrong.
ops: Any = keras.ops
train_validation_split: Any = array_slicing.train_validation_split

# Whether a layer divides the penalty on its outputs by their number of rows. True from 3.14 on.
DIVIDES_ACTIVITY_PENALTY = _VERSION >= (3, 14)


@dataclass(frozen=True)
class Hooks:
    """What kerasdist does at each place where it steps into Keras.

    Every function gets Keras's own one first, then the arguments of the call.

    Attributes:
        model_created: ``Trainer.__init__``: a model remembers the strategy of its scope.
        layer_created: ``Layer.__init__``: its activity regularizer learns of replicas.
        metric_created: ``Metric.__init__``: a metric that Keras does not ship learns of replicas.
        variable_created: ``Variable.__init__``: a variable remembers the strategy of its scope.
        compile: ``model.compile``: optimizer and metrics belong to the model's strategy.
        fit: ``model.fit`` of the backend's trainer: the data go through a strategy's adapter.
        evaluate: ``model.evaluate``, likewise.
        predict: ``model.predict``, likewise.
        apply: ``optimizer.apply``: gradients are combined over the replicas first.
        scale_by_optimizer: ``optimizer.scale_loss``.
        assign: The end of ``Variable.assign``.
        reduce_loss: The mean or sum at the end of a Keras loss.
        scale_loss: Keras's own division by the number of replicas, on TensorFlow.
        unscale_loss: Its inverse.
        update_mean: ``Mean.update_state`` and ``Sum.update_state``.
        update_wrapped: ``MeanMetricWrapper.update_state``.
        batch_norm_weight: ``BatchNormalization.add_weight``: how moving statistics are aggregated.
        batch_moments: ``BatchNormalization._moments``.
        draw_seed: ``SeedGenerator.next``.
        add_loss: ``Layer.add_loss``.
        own_losses: ``Layer._get_own_losses``.
        clear_losses: ``Layer._clear_losses``.
    """

    model_created: Callable[..., None]
    layer_created: Callable[..., None]
    metric_created: Callable[..., None]
    variable_created: Callable[..., None]
    compile: Callable[..., Any]
    fit: Callable[..., Any]
    evaluate: Callable[..., Any]
    predict: Callable[..., Any]
    apply: Callable[..., Any]
    scale_by_optimizer: Callable[..., Any]
    assign: Callable[..., Any]
    reduce_loss: Callable[..., Any]
    scale_loss: Callable[..., Any]
    unscale_loss: Callable[..., Any]
    update_mean: Callable[..., Any]
    update_wrapped: Callable[..., Any]
    batch_norm_weight: Callable[..., Any]
    batch_moments: Callable[..., Any]
    draw_seed: Callable[..., Any]
    add_loss: Callable[..., Any]
    own_losses: Callable[..., Any]
    clear_losses: Callable[..., Any]


# Private methods of Keras's trainers that a backend's trainer overrides by name, and why.
OVERRIDDEN: dict[str, str] = {
    "_compute_loss": "on torch: its value is looked at, and a vector stays one in a replica",
    "_get_metrics_result_or_logs": "on torch: once an epoch, to look at the losses of the replicas",
    "_symbolic_build": "what it makes belongs to the strategy",
    "_maybe_symbolic_build": "on TensorFlow it would take a batch from the data, then lost",
    "_get_jax_state": "on JAX it hands out the state, which must be on the replicas' devices",
}

# Where each hook is put in: the owner of a function, and the function's name.
PLACES: dict[str, tuple[tuple[Any, str], ...]] = {
    "model_created": ((Trainer, "__init__"),),
    "layer_created": ((Layer, "__init__"),),
    "metric_created": ((keras.metrics.Metric, "__init__"),),
    "variable_created": ((keras.Variable, "__init__"),),
    "compile": ((Trainer, "compile"),),
    "fit": ((BackendTrainer, "fit"),),
    "evaluate": ((BackendTrainer, "evaluate"),),
    "predict": ((BackendTrainer, "predict"),),
    "apply": ((BaseOptimizer, "apply"), (LossScaleOptimizer, "apply")),
    "scale_by_optimizer": ((BaseOptimizer, "scale_loss"), (LossScaleOptimizer, "scale_loss")),
    "assign": ((keras.Variable, "_direct_assign"),),
    "reduce_loss": ((loss_module, "reduce_weighted_values"),),
    "scale_loss": ((loss_module, "scale_loss_for_distribution"),),
    "unscale_loss": ((loss_module, "unscale_loss_for_distribution"),),
    "update_mean": (
        (keras.metrics.Mean, "update_state"),
        (keras.metrics.Sum, "update_state"),
    ),
    "update_wrapped": ((keras.metrics.MeanMetricWrapper, "update_state"),),
    "batch_norm_weight": ((keras.layers.BatchNormalization, "add_weight"),),
    "batch_moments": ((keras.layers.BatchNormalization, "_moments"),),
    "draw_seed": ((SeedGenerator, "next"),),
    "add_loss": ((Layer, "add_loss"),),
    "own_losses": ((Layer, "_get_own_losses"),),
    "clear_losses": ((Layer, "_clear_losses"),),
}

_installed: list[Hooks] = []


def install(hooks: Hooks) -> None:
    """Puts the hooks in, once in a process.

    Args:
        hooks: What to do at each place.
    """
    if _installed:
        return
    _installed.append(hooks)
    for field in fields(hooks):
        for owner, name in PLACES[field.name]:
            _put_in(owner, name, getattr(hooks, field.name))


def _put_in(owner: Any, name: str, hook: Callable[..., Any]) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def hooked(*args: Any, **kwargs: Any) -> Any:
        return hook(original, *args, **kwargs)

    # Keras reads the arguments of a layer's `__init__` in a way that does not follow `__wrapped__`.
    hooked.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
    setattr(owner, name, hooked)


def install_apply_mask(hook: Callable[..., Any]) -> None:
    """Puts in the hook that PyTorch alone needs, where a loss merges a mask into sample weights.

    Args:
        hook: Like those of `Hooks`.
    """
    _put_in(loss_module, "apply_mask", hook if _VERSION >= (3, 15) else _with_own_mask(hook))


def _with_own_mask(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Hands the hook an ``apply_mask`` that leaves the mask alone, as Keras's does from 3.15 on."""

    @functools.wraps(hook)
    def hooked(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        def apply_mask(sample_weight: Any, mask: Any, **options: Any) -> Any:
            return original(sample_weight, None if mask is None else ops.copy(mask), **options)

        return hook(apply_mask, *args, **kwargs)

    return hooked


def install_dropout(hook: Callable[..., Any]) -> None:
    """Puts in the hook that PyTorch alone needs, where Keras drops units.

    Args:
        hook: Like those of `Hooks`.
    """
    _put_in(backend.random, "dropout", hook)


def install_in_variables(hook: Callable[..., Any]) -> None:
    """Puts in a hook that PyTorch and JAX need, where a variable is made.

    Args:
        hook: Like those of `Hooks`.
    """
    _put_in(keras.Variable, "__init__", hook)


def install_in_build(hook: Callable[..., Any]) -> None:
    """Puts in a hook that PyTorch alone needs, where a layer's first call builds it.

    Args:
        hook: Like those of `Hooks`.
    """
    _put_in(Layer, "_maybe_build", hook)


def install_scope_reads(hook: Callable[..., Any]) -> None:
    """Puts in the hook that JAX alone needs, where a scope is asked for a variable's value.

    Args:
        hook: Like those of `Hooks`.
    """
    _put_in(keras.StatelessScope, "get_current_value", hook)


def install_reads(notice: Callable[[Any], None]) -> None:
    """Puts in what TensorFlow alone needs: it is told of every variable that is read.

    Args:
        notice: Takes a Keras variable.
    """
    value = keras.Variable.value.fget

    def noticed(variable: Any) -> Any:
        notice(variable)
        return value(variable)

    keras.Variable.value = property(noticed, doc=value.__doc__)


def install_scaled_apply(hook: Callable[..., Any]) -> None:
    """Puts in the hook that JAX alone needs, where an optimizer scales the loss by itself.

    Args:
        hook: Like those of `Hooks`.
    """
    _put_in(LossScaleOptimizer, "apply", hook)


def is_seeded(seed: Any) -> bool:
    """Returns whether the user chose the seed of a draw; if not, torch's own generator decides.

    Args:
        seed: None, an int, or a ``keras.random.SeedGenerator``.
    """
    return seed is not None and not (isinstance(seed, SeedGenerator) and seed._initial_seed is None)


def flat_layers(model: Any) -> list[Any]:
    """Returns a model's layers, layers inside of layers too.

    Args:
        model: A Keras model.
    """
    return list(model._flatten_layers(include_self=False))


def keeps_or_mixes_draws(layer: Any) -> bool:
    """Returns whether two threads that run a layer on PyTorch could disturb each other's draws.

    A recurrent cell keeps its dropout masks on itself; draws from a few distributions (beta, gamma,
    binomial, as layers for images make them) set torch's own generator for a moment.

    Args:
        layer: One of Keras's layers.
    """
    if isinstance(layer, DropoutRNNCell):
        cell: Any = layer  # the class says in words what its heirs have
        return bool(cell.dropout or cell.recurrent_dropout)
    return bool(layer._seed_generators) and not type(layer).__module__.startswith(_NOISE)


def backend_name() -> str:
    """Returns the name of the framework that Keras runs on."""
    return keras.config.backend()


def is_kerass_own(function_or_class: Any) -> bool:
    """Returns whether Keras ships this function or class.

    Args:
        function_or_class: Anything with a ``__module__``.
    """
    module = getattr(function_or_class, "__module__", None) or ""
    # Keras's own tests play the user.
    return module.partition(".")[0] == "keras" and not module.endswith("_test")


def save_as(own: type, stand_in: type) -> None:
    """Lets the objects of a class be saved and pickled as those of another.

    Args:
        own: A class of Keras's or the user's, registered for saving or not.
        stand_in: The class that takes its place in this process.
    """
    for names in (object_registration.GLOBAL_CUSTOM_NAMES, api_export.REGISTERED_OBJS_TO_NAMES):
        if own in names:
            names[stand_in] = names[own]
    if issubclass(own, KerasSaveable):
        stand_in._unpickle_model = own._unpickle_model


def copy_thread_state() -> dict[str, Any]:
    """Returns what Keras remembers for the calling thread: scopes, policies, the device."""
    return dict(vars(global_state.GLOBAL_STATE_TRACKER))


def paste_thread_state(state: dict[str, Any]) -> None:
    """Makes Keras remember in the calling thread what it did in another one.

    Args:
        state: The result of `copy_thread_state` there.
    """
    here = vars(global_state.GLOBAL_STATE_TRACKER)
    here.clear()
    # Stacks, such as that of name scopes, are each thread's own from here on.
    here.update({key: list(v) if isinstance(v, list) else v for key, v in state.items()})


def loss_tracker(model: Any) -> Any:
    """Returns the mean in which a compiled model gathers its losses.

    Args:
        model: A Keras model.
    """
    return model._loss_tracker


def optimized_variables(optimizer: Any) -> list[Any]:
    """Returns the variables that an optimizer was built for, in its order.

    Args:
        optimizer: A Keras optimizer.
    """
    return list(optimizer._trainable_variables)


def apply_combined_gradients(optimizer: Any, gradients: list[Any], variables: Any) -> None:
    """Does Keras's own part of ``optimizer.apply``, with the gradients of all replicas.

    A user's class that overrides `apply` has had its say in each replica.

    Args:
        optimizer: A Keras optimizer that is built.
        gradients: One for each variable, None where there is none.
        variables: The variables, or None for all that the optimizer knows.
    """
    if isinstance(optimizer, LossScaleOptimizer):
        # On TensorFlow its `apply` insists on being called in a replica.
        optimizer._common_apply(gradients, variables)
    else:
        BaseOptimizer.apply(optimizer, gradients, variables)


def apply_scaled_gradients(optimizer: Any, gradients: list[Any], variables: Any) -> None:
    """Does what ``LossScaleOptimizer.apply`` does, where JAX traces it.

    There Keras's own leaks values out of the branches that it takes for finite and other gradients
    (seen with 3.15.1); its stateless form does not.

    Args:
        optimizer: A ``LossScaleOptimizer``.
        gradients: One for each variable, None where there is none.
        variables: The variables, or None for all that the optimizer knows.
    """
    if not optimizer.built:
        with backend.name_scope(optimizer.name, caller=optimizer):
            optimizer.build(variables)
        optimizer.built = True
    every = optimized_variables(optimizer)
    of = dict(zip(map(id, variables or every), gradients, strict=True))
    new, own = optimizer.stateless_apply(
        [variable.value for variable in optimizer.variables],
        [of.get(id(variable)) for variable in every],
        [variable.value for variable in every],
    )
    for variable, value in zip([*every, *optimizer.variables], [*new, *own], strict=True):
        variable.assign(value)


def change_aggregation(variable: Any, aggregation: str, value: Any) -> None:
    """Makes a variable anew for another way to aggregate it over replicas.

    Args:
        variable: A Keras variable that no compiled function has seen.
        aggregation: One of Keras's aggregations.
        value: Its value from now on.
    """
    variable._aggregation = aggregation
    variable._initialize(value)


def make_anew(variable: Any) -> None:
    """Makes the framework's variable anew, with its value, as the scope in force wants it.

    Args:
        variable: A Keras variable that no compiled function has seen.
    """
    variable._initialize(variable.numpy())


def adopt_optimizer(optimizer: Any, strategy: Any) -> None:
    """Moves a TensorFlow optimizer that has no state yet to another strategy.

    Args:
        optimizer: A Keras optimizer that is not built.
        strategy: The ``tf.distribute.Strategy``, whose scope is open.
    """
    for variable in optimizer._variables:
        make_anew(variable)
    optimizer._distribution_strategy = strategy


def computes_on_gradients(optimizer: Any) -> bool:
    """Returns whether an optimizer does more with gradients than hand them to ``update_step``.

    Args:
        optimizer: A Keras optimizer.
    """
    computing = ("clipnorm", "clipvalue", "global_clipnorm", "loss_scale_factor")
    return (
        not is_kerass_own(type(optimizer))
        or isinstance(optimizer, LossScaleOptimizer)
        or bool(optimizer.gradient_accumulation_steps)
        or any(getattr(optimizer, name) is not None for name in computing)
    )


@contextmanager
def outside_stateless_scopes() -> Iterator[None]:
    """Lets code inside read and write the variables themselves, whatever scopes are open."""
    scope = global_state.get_global_attribute(_STATELESS_SCOPE)
    global_state.set_global_attribute(_STATELESS_SCOPE, None)
    try:
        yield
    finally:
        global_state.set_global_attribute(_STATELESS_SCOPE, scope)


def stateless_scope() -> Any:
    """Returns the ``keras.StatelessScope`` that is open in this thread, or None."""
    return global_state.get_global_attribute(_STATELESS_SCOPE)


def initialize_waiting_variables() -> None:
    """Gives values to the variables that this thread made while a stateless scope was open."""
    waiting = global_state.get_global_attribute(_UNINITIALIZED) or ()
    global_state.set_global_attribute(_UNINITIALIZED, [])
    for variable in waiting:
        initialize_waiting_variable(variable)


def initialize_waiting_variable(variable: Any) -> None:
    """Gives its value to a variable that was made while a stateless scope was open.

    Args:
        variable: A Keras variable.
    """
    if variable._value is None:
        with outside_stateless_scopes():
            variable._deferred_initialize()


def global_seed_generator() -> Any:
    """Returns the generator that unseeded draws of this thread take their seeds from, or None."""
    return global_state.get_global_attribute(_GLOBAL_SEED_GENERATOR)


def set_global_seed_generator(generator: Any) -> None:
    """Sets the generator that unseeded draws of this thread take their seeds from.

    Args:
        generator: An object with the method ``next`` of ``keras.random.SeedGenerator``, or None.
    """
    global_state.set_global_attribute(_GLOBAL_SEED_GENERATOR, generator)


def stored_value(variable: Any) -> Any:
    """Returns where a variable keeps its value, whatever scopes are open; None if it has none yet.

    Args:
        variable: A Keras variable.
    """
    return variable._value


def store_value(variable: Any, value: Any) -> None:
    """Puts a value where a variable keeps it, whatever scopes are open.

    Args:
        variable: A Keras variable.
        value: An array of its shape and type.
    """
    variable._value = value


def multiply_initializer(variable: Any, factor: int) -> None:
    """Lets a variable that has no value yet begin with a multiple of what was said.

    Args:
        variable: A Keras variable that was made while a stateless scope was open.
        factor: The factor.
    """
    initializer = variable._initializer
    variable._initializer = lambda *args, **kwargs: initializer(*args, **kwargs) * factor


def stored_dtype(variable: Any) -> str:
    """Returns the type in which a variable keeps its value, whatever it is cast to when read.

    Args:
        variable: A Keras variable.
    """
    return variable._dtype


def is_dataset(source: Any) -> bool:
    """Returns whether Keras knows this kind of dataset, generators left out.

    Args:
        source: Anything.
    """
    return (
        isinstance(source, keras.utils.PyDataset)
        or data_adapters.is_tf_dataset(source)
        or data_adapters.is_torch_dataloader(source)
        or data_adapters.is_grain_dataset(source)
    )


def is_native_dataset(source: Any) -> bool:
    """Returns whether this is a dataset of the framework's that Keras runs on: ``tf.data``.

    Args:
        source: Anything.
    """
    return backend_name() == "tensorflow" and data_adapters.is_tf_dataset(source)


def batches(dataset: Any) -> Iterator[Any]:
    """Yields a dataset's batches once, of NumPy arrays, with the workers that the dataset has.

    Args:
        dataset: What `is_dataset` knows.
    """
    adapter = get_data_adapter(dataset)
    adapter.on_epoch_begin()
    try:
        yield from adapter.get_numpy_iterator()
    finally:
        adapter.on_epoch_end()


def spec_of_rows(leaf: Any) -> Any:
    """Returns the type and shape of a batch's array, of any number of rows; anything else as it is.

    Args:
        leaf: An array or tensor, or something that is none.
    """
    if len(getattr(leaf, "shape", ())) == 0:
        return leaf
    dtype = keras.backend.standardize_dtype(leaf.dtype)
    return keras.KerasTensor((None, *leaf.shape[1:]), dtype)


def referenced_variables(optimizer: Any, variables: Iterable[Any]) -> list[Any]:
    """Returns for each variable of an optimizer the model's variable that it was made for.

    Keras remembers it in the name alone: the path, with underscores, and the slot's name.

    Args:
        optimizer: A Keras optimizer.
        variables: The model's variables.

    Returns:
        One variable each; the optimizer's own where there is no such variable.
    """
    by_prefix = {f"{one.path.replace('/', '_')}_": one for one in variables}

    def reference(variable: Any) -> Any:
        fits = [
            prefix
            for prefix, one in by_prefix.items()
            if prefix in variable.path and one.shape == variable.shape
        ]
        return by_prefix[max(fits, key=len)] if fits else variable

    return [reference(variable) for variable in optimizer.variables]
