"""The hooks in Keras, and how they are installed.

For a model that no strategy made, and for code outside of replicas, a hook only calls Keras's own
code (contract C3).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import keras
from keras.src import backend
from keras.src.layers.layer import Layer
from keras.src.legacy.saving import legacy_h5_format
from keras.src.losses import loss as loss_module
from keras.src.models.model import Trainer as BackendTrainer
from keras.src.optimizers.base_optimizer import BaseOptimizer
from keras.src.random.seed_generator import SeedGenerator
from keras.src.saving import saving_lib
from keras.src.trainers.trainer import Trainer

from kerasdist.keras_compat.models import _VERSION, ops
from kerasdist.keras_compat.optimizers import LossScaleOptimizer


@dataclass(frozen=True)
class Hooks:
    """What kerasdist does at each place where it steps into Keras.

    Every function gets Keras's own one first, then the arguments of the call.

    Attributes:
        model_created: ``Trainer.__init__``: a model remembers the strategy of its scope.
        layer_created: ``Layer.__init__``: its activity regularizer sees the global batch in `fit`.
        metric_created: ``Metric.__init__``: a metric that Keras does not ship sees it too.
        variable_created: ``Variable.__init__``: a variable remembers the strategy of its scope.
        compile: ``model.compile``: optimizer and metrics belong to the model's strategy.
        save: The functions that write a model's file or folder: in a job, the chief writes.
        fit: ``model.fit`` of the backend's trainer: the data go through a strategy's adapter.
        evaluate: ``model.evaluate``, likewise.
        predict: ``model.predict``, likewise.
        on_batch: ``model.train_on_batch``, ``test_on_batch`` and ``predict_on_batch``: warns of a
            model that was made outside of the scope.
        apply: ``optimizer.apply``: gradients are combined over the replicas first.
        scale_by_optimizer: ``optimizer.scale_loss``.
        assign: The end of ``Variable.assign``.
        reduce_loss: The mean or sum at the end of a Keras loss.
        scale_loss: Keras's own division by the number of replicas, on TensorFlow.
        unscale_loss: Keras's inverse of `scale_loss`.
        update_mean: ``Mean.update_state`` and ``Sum.update_state``.
        update_wrapped: ``MeanMetricWrapper.update_state``.
        batch_norm_created: ``BatchNormalization.__init__``: allows ``synchronized=True``.
        batch_norm_weight: ``BatchNormalization.add_weight``: moving statistics are averaged.
        batch_norm_called: ``BatchNormalization.call``: so are those made outside of a scope.
        batch_moments: ``BatchNormalization._moments``.
        draw_seed: ``SeedGenerator.next``.
        draw: The random functions of ``keras.random``: a trial repeats its draws.
        add_loss: ``Layer.add_loss``.
        own_losses: ``Layer._get_own_losses``.
        clear_losses: ``Layer._clear_losses``.
        sequential_build: ``Sequential.build``: its inner Functional model gets no strategy.
    """

    model_created: Callable[..., None]
    layer_created: Callable[..., None]
    metric_created: Callable[..., None]
    variable_created: Callable[..., None]
    compile: Callable[..., Any]
    save: Callable[..., Any]
    fit: Callable[..., Any]
    evaluate: Callable[..., Any]
    predict: Callable[..., Any]
    on_batch: Callable[..., Any]
    apply: Callable[..., Any]
    scale_by_optimizer: Callable[..., Any]
    assign: Callable[..., Any]
    reduce_loss: Callable[..., Any]
    scale_loss: Callable[..., Any]
    unscale_loss: Callable[..., Any]
    update_mean: Callable[..., Any]
    update_wrapped: Callable[..., Any]
    batch_norm_created: Callable[..., None]
    batch_norm_weight: Callable[..., Any]
    batch_norm_called: Callable[..., Any]
    batch_moments: Callable[..., Any]
    draw_seed: Callable[..., Any]
    draw: Callable[..., Any]
    add_loss: Callable[..., Any]
    own_losses: Callable[..., Any]
    clear_losses: Callable[..., Any]
    sequential_build: Callable[..., Any]


# Keras's random functions; the last two take a tensor and change it.
DRAWING = (
    "beta",
    "binomial",
    "categorical",
    "gamma",
    "normal",
    "randint",
    "truncated_normal",
    "uniform",
)
RESHUFFLING = ("dropout", "shuffle")


# Private methods of Keras's trainers that a backend's trainer overrides by name, and why.
OVERRIDDEN: dict[str, str] = {
    "_compute_loss": "on torch: its value is looked at, and a vector stays one in a replica",
    "_get_metrics_result_or_logs": "on torch: once an epoch, to look at the losses of the replicas",
    "_symbolic_build": "what it makes belongs to the strategy",
    "_maybe_symbolic_build": "on TensorFlow it would take a batch from the data, then lost",
    "_get_jax_state": "on JAX it hands out the state, which must be on the replicas' devices",
}


# The functions that each hook replaces: owner and name.
PLACES: dict[str, tuple[tuple[Any, str], ...]] = {
    "model_created": ((Trainer, "__init__"),),
    "layer_created": ((Layer, "__init__"),),
    "metric_created": ((keras.metrics.Metric, "__init__"),),
    "variable_created": ((keras.Variable, "__init__"),),
    "compile": ((Trainer, "compile"),),
    "save": (
        (saving_lib, "save_model"),
        (saving_lib, "save_weights_only"),
        (legacy_h5_format, "save_model_to_hdf5"),
        (keras.Model, "export"),
    ),
    "fit": ((BackendTrainer, "fit"),),
    "evaluate": ((BackendTrainer, "evaluate"),),
    "predict": ((BackendTrainer, "predict"),),
    "on_batch": (
        (BackendTrainer, "train_on_batch"),
        (BackendTrainer, "test_on_batch"),
        (BackendTrainer, "predict_on_batch"),
    ),
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
    "batch_norm_created": ((keras.layers.BatchNormalization, "__init__"),),
    "batch_norm_weight": ((keras.layers.BatchNormalization, "add_weight"),),
    "batch_norm_called": ((keras.layers.BatchNormalization, "call"),),
    "batch_moments": ((keras.layers.BatchNormalization, "_moments"),),
    "draw_seed": ((SeedGenerator, "next"),),
    "draw": tuple((backend.random, name) for name in (*DRAWING, *RESHUFFLING)),
    "add_loss": ((Layer, "add_loss"),),
    "own_losses": ((Layer, "_get_own_losses"),),
    "clear_losses": ((Layer, "_clear_losses"),),
    "sequential_build": ((keras.Sequential, "build"),),
}


_installed: list[Hooks] = []


def install(hooks: Hooks) -> None:
    """Installs the hooks, once per process."""
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

    # Keras reads the arguments of a layer's `__init__` without following `__wrapped__`.
    # It copies the attributes of `build` to a function without `self`.
    if name != "build":
        hooked.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
    setattr(owner, name, hooked)


def install_apply_mask(hook: Callable[..., Any]) -> None:
    """Installs a hook where a loss merges a mask into sample weights; on PyTorch only."""
    _put_in(loss_module, "apply_mask", hook if _VERSION >= (3, 15) else _with_own_mask(hook))


def _with_own_mask(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Gives the hook an ``apply_mask`` that does not change the mask, as from Keras 3.15 on."""

    @functools.wraps(hook)
    def hooked(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        def apply_mask(sample_weight: Any, mask: Any, **options: Any) -> Any:
            return original(sample_weight, None if mask is None else ops.copy(mask), **options)

        return hook(apply_mask, *args, **kwargs)

    return hooked


def install_dropout(hook: Callable[..., Any]) -> None:
    """Installs a hook where Keras drops units; on PyTorch only."""
    _put_in(backend.random, "dropout", hook)


def install_in_torch_nn(name: str, hook: Callable[..., Any]) -> None:
    """Installs a hook in a function of Keras's ``nn`` module; on PyTorch only."""
    _put_in(backend.nn, name, hook)


def install_backward_code(remat: Callable[..., Any], custom_gradient: Callable[..., Any]) -> None:
    """Installs hooks where Keras has Python code run in the backward pass; on PyTorch only."""
    _put_in(backend.core, "remat", remat)
    _put_in(backend.core.custom_gradient, "__call__", custom_gradient)


def install_in_variables(hook: Callable[..., Any]) -> None:
    """Installs a hook where a variable is made; on PyTorch and JAX only."""
    _put_in(keras.Variable, "__init__", hook)


def install_scope_reads(hook: Callable[..., Any]) -> None:
    """Installs a hook where a scope returns a variable's value; on JAX only."""
    _put_in(keras.StatelessScope, "get_current_value", hook)


def install_reads(hook: Callable[..., Any]) -> None:
    """Installs a hook in every read of a variable."""
    value: Any = keras.Variable.value.fget
    read = functools.partial(hook, value)
    keras.Variable.value = property(read, doc=value.__doc__)


def install_initial_values(hook: Callable[..., Any]) -> None:
    """Installs a hook where an initializer gives a variable its first value; on JAX only."""
    _put_in(keras.Variable, "_initialize_with_initializer", hook)


def install_stored_values(hook: Callable[..., Any]) -> None:
    """Installs a hook where a variable stores a value that it is assigned; not on TensorFlow."""
    _put_in(keras.Variable, "_direct_assign", hook)


def install_slots(from_weight: Callable[..., Any], alone: Callable[..., Any] | None = None) -> None:
    """Installs hooks where an optimizer makes a variable, for a weight or not."""
    _put_in(keras.optimizers.Optimizer, "add_variable_from_reference", from_weight)
    if alone is not None:
        _put_in(keras.optimizers.Optimizer, "add_variable", alone)


def install_updates(
    update: Callable[..., Any], clip: Callable[..., Any], check_finite: Callable[..., Any]
) -> None:
    """Installs hooks where an optimizer uses gradients; on PyTorch only."""
    _put_in(BaseOptimizer, "_backend_apply_gradients", update)
    _put_in(BaseOptimizer, "_clip_gradients", clip)
    _put_in(LossScaleOptimizer, "check_finite", check_finite)


def install_tracked_parameters(hook: Callable[..., Any]) -> None:
    """Installs a hook where a layer registers its variables as parameters; on PyTorch only."""
    for name in ("_track_variables", "_post_track_variable"):
        _put_in(Layer, name, hook)


def install_stateless_apply(hook: Callable[..., Any]) -> None:
    """Installs a hook where an optimizer updates values that are passed to it; on JAX only."""
    for owner in (BaseOptimizer, LossScaleOptimizer):
        _put_in(owner, "stateless_apply", hook)


def install_outside_replicas(
    scale_loss: Callable[..., Any],
    apply: Callable[..., Any],
    build: Callable[..., Any],
    make_state: Callable[..., Any],
) -> None:
    """Installs the hooks for losses and optimizers outside of replicas; on TensorFlow only."""
    for name in ("scale_loss_for_distribution", "unscale_loss_for_distribution"):
        _put_in(loss_module, name, scale_loss)
    for owner in (BaseOptimizer, LossScaleOptimizer):
        _put_in(owner, "apply", apply)
    _put_in(BaseOptimizer, "build", build)
    # These methods belong to Keras's base class of optimizers on TensorFlow.
    for name in ("add_variable_from_reference", "add_variable"):
        _put_in(keras.optimizers.Optimizer, name, make_state)


def install_batch_moments(hook: Callable[..., Any]) -> None:
    """Installs a hook where BatchNormalization computes a batch's moments; on JAX only."""
    _put_in(keras.layers.BatchNormalization, "_moments", hook)


def install_to_numpy(hook: Callable[..., Any]) -> None:
    """Installs a hook where a tensor becomes a NumPy array; on JAX only."""
    _put_in(backend, "convert_to_numpy", hook)


def install_scaled_apply(hook: Callable[..., Any]) -> None:
    """Installs a hook where a LossScaleOptimizer applies gradients; on JAX only."""
    _put_in(LossScaleOptimizer, "apply", hook)
