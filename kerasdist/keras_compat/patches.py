"""What is patched in Keras: one table, and how its functions are put in.

Each function gets Keras's own one first (or the next function of its row), then the arguments of
the call. For a model that no strategy made, and for code outside of replicas, it only calls that
(contract C3).
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter
from types import ModuleType
from typing import Any, final

import keras
from keras import metrics
from keras.src import backend
from keras.src.layers.layer import Layer
from keras.src.legacy.saving import legacy_h5_format
from keras.src.losses import loss as loss_module
from keras.src.losses import losses
from keras.src.metrics import reduction_metrics
from keras.src.models.model import Trainer as BackendTrainer
from keras.src.optimizers.base_optimizer import BaseOptimizer
from keras.src.random.seed_generator import SeedGenerator
from keras.src.saving import saving_lib
from keras.src.trainers.compile_utils import CompileLoss
from keras.src.trainers.trainer import Trainer

from kerasdist.keras_compat.models import _VERSION, ops
from kerasdist.keras_compat.optimizers import LossScaleOptimizer

Function = Callable[..., Any]
Target = tuple[Any, str]


@final
@dataclass(frozen=True)
class Patch:
    """A row of the table.

    Attributes:
        functions: The names of the functions that run there, the outermost first.
        targets: The functions or properties of Keras that are replaced: owner and name.
        reason: What for; on which backends, if not on all.
    """

    functions: tuple[str, ...]
    targets: tuple[Target, ...]
    reason: str


def _row(functions: str, owners: object, names: str, reason: str) -> Patch:
    """Returns a row, from names with spaces between, and one owner or several."""
    listed = owners if isinstance(owners, tuple) else (owners,)
    targets = tuple((owner, name) for owner in listed for name in names.split())
    return Patch(tuple(functions.split()), targets, reason)


_OPTIMIZERS = BaseOptimizer, LossScaleOptimizer  # the second overrides the first
_LOSS_OF_FUNCTION = losses.LossFunctionWrapper
_NORMALIZATION = keras.layers.BatchNormalization
_TRAINER = sys.modules[BackendTrainer.__module__]

HAS_DDP = hasattr(BackendTrainer, "_initialize_ddp")
"""Whether this Keras, from 3.16 on torch, wraps models by DistributedDataParallel by itself."""

# All supported versions of Keras have these places; `apply_mask` changes with 3.15. The last two
# rows are of 3.16.
PATCHES: tuple[Patch, ...] = (
    # Models, layers and metrics.
    _row("model_created", Trainer, "__init__", "a model remembers the strategy of its scope"),
    _row("metric_created", metrics.Metric, "__init__", "a user's metric sees the global batch"),
    _row("reduce_values", reduction_metrics, "reduce_to_samplewise_values", "a mean of all rows"),
    _row("update_wrapped", metrics.MeanMetricWrapper, "update_state", "likewise"),
    _row("add_loss", Layer, "add_loss", "a replica has the losses that its layers add"),
    _row("losses", Layer, "losses", "likewise"),
    _row("clear_losses", Layer, "_clear_losses", "likewise"),
    # Calls of a model; one from outside of the scope is computed on one device, or refused.
    _row("compile", Trainer, "compile", "optimizer and metrics belong to the model's strategy"),
    _row("fit", BackendTrainer, "fit", "the data go through a strategy's adapter"),
    _row("evaluate", BackendTrainer, "evaluate predict", "likewise"),
    _row("on_batch", BackendTrainer, "train_on_batch test_on_batch", "likewise"),
    _row("save", saving_lib, "save_model save_weights_only", "in a job, the chief writes"),
    _row("save", legacy_h5_format, "save_model_to_hdf5", "likewise"),
    # Variables: their strategy; on JAX and torch they may be made in a program or replica.
    _row(
        "variable_created variable_made slot_made", keras.Variable, "__init__", "strategies; slots"
    ),
    _row("initialize", keras.Variable, "_initialize_with_initializer", "JAX, torch: shards"),
    _row("assign store", keras.Variable, "_direct_assign", "values combine; JAX, torch: shards"),
    # Shards are gathered; on JAX what was read is not donated; on TensorFlow there are listeners.
    _row("read_whole read", keras.Variable, "value", "JAX, torch: shards; JAX, TensorFlow: reads"),
    _row("track", Layer, "_track_variables", "torch: shards are parameters"),
    _row("keep_placed", _TRAINER, "_distribute_data", "JAX workers: JAX refuses to place it again"),
    # Losses and normalization.
    _row("pair_targets", CompileLoss, "call", "a replica's rows are not targets of each output"),
    _row("call_loss", _LOSS_OF_FUNCTION, "call", "Keras's losses that mix examples see all rows"),
    _row("reduce_loss", loss_module, "reduce_weighted_values", "a share of the global loss"),
    _row("scale_loss scale_outside", loss_module, "scale_loss_for_distribution", "C2's division"),
    _row("unscale_loss scale_outside", loss_module, "unscale_loss_for_distribution", "its inverse"),
    _row("apply_mask", loss_module, "apply_mask", "torch: the factor is of the global batch"),
    _row("batch_norm_created", _NORMALIZATION, "__init__", "allows synchronized=True"),
    _row("batch_norm_weight", _NORMALIZATION, "add_weight", "moving statistics are averaged"),
    _row("batch_norm_called", _NORMALIZATION, "call", "so are those made outside of a scope"),
    _row("moments_of_mesh batch_moments", _NORMALIZATION, "_moments", "of the global batch"),
    _row("nn_normalization", backend, "nn.batch_normalization", "torch: its fused kernels"),
    # Optimizers.
    # On TensorFlow also outside of replicas; on JAX scaled gradients in custom loops.
    _row("apply apply_outside", BaseOptimizer, "apply", "gradients are combined over replicas"),
    _row("apply apply_outside apply_scaled", LossScaleOptimizer, "apply", "likewise"),
    _row("scale_by_optimizer", _OPTIMIZERS, "scale_loss", "weights come first, for float16"),
    _row("build", BaseOptimizer, "build", "TensorFlow: variables from outside are mirrored"),
    _row("slot", keras.optimizers.Optimizer, "add_variable_from_reference", "whose slot it is"),
    _row("stateless_apply", BaseOptimizer, "stateless_apply", "JAX: shards are updated"),
    _row("update", BaseOptimizer, "_backend_apply_gradients", "torch: shards are updated"),
    _row("clip", BaseOptimizer, "_clip_gradients", "torch: norms over all shards"),
    _row("check_finite", LossScaleOptimizer, "check_finite", "torch: on all workers"),
    # Random numbers: a trial repeats draws on TensorFlow, a replica has its rows of one device's.
    _row("draw_seed", SeedGenerator, "next", "a replica's own draws"),
    _row("draw draw_rows dropout", backend, "random", "trials on TensorFlow; rows; dropout"),
    # On torch: code that goes backward, and torch's own modules.
    _row("remat", backend, "core.remat", "it is in its replica again"),
    _row("custom_gradient", backend, "core.custom_gradient.__call__", "likewise"),
    _row("named_parameters", Layer, "named_parameters", "the replica's"),
    _row("module_parameters", keras.layers, "TorchModuleWrapper.parameters", "likewise"),
    _row("module_call", keras.layers, "TorchModuleWrapper.call", "likewise"),
)
if HAS_DDP:
    PATCHES += (
        _row("initialize_ddp", BackendTrainer, "_initialize_ddp", "torch: not in our group"),
        _row("metrics_result", BackendTrainer, "get_metrics_result", "likewise"),
    )


@final
@dataclass
class _Place:
    """A target that is patched.

    Attributes:
        original: Keras's own function, or a property's.
        functions: What runs in its place, by the names in the table.
    """

    original: Function
    functions: dict[str, Function] = field(default_factory=dict[str, Function])


_places: dict[tuple[int, str], _Place] = {}


def install(**functions: Function) -> None:
    """Puts functions into Keras, by their names in the table; each name once per process."""
    left = set(functions)
    for patch in PATCHES:
        own = {name: functions[name] for name in patch.functions if name in functions}
        left.difference_update(own)
        for owner, name in patch.targets if own else ():
            _put_in(patch, owner, name, own)
    assert not left, left


def _put_in(patch: Patch, owner: object, path: str, functions: dict[str, Function]) -> None:
    *outer, name = path.split(".")
    owner = attrgetter(".".join(outer))(owner) if outer else owner
    now = inspect.getattr_static(owner, name)
    if isinstance(now, ModuleType):
        public = getattr(keras, name)
        for each, function in tuple(vars(now).items()):
            if hasattr(public, each) and callable(function) and not inspect.isclass(function):
                _put_in(patch, now, each, functions)
        return
    place = _places.get((id(owner), name))
    if place is None:
        original: Any = now.fget if isinstance(now, property) else getattr(owner, name)
        if path == "apply_mask" and _VERSION < (3, 15):
            original = _without_change_of_mask(original)
        place = _places[id(owner), name] = _Place(original)
    place.functions.update(functions)
    *before, last = (place.functions[one] for one in patch.functions if one in place.functions)
    call = functools.partial(last, place.original)
    for outer_one in reversed(before):
        call = functools.partial(outer_one, _as_function(call, place.original))
    if isinstance(now, property):
        setattr(owner, name, property(call, doc=place.original.__doc__))
    else:
        setattr(owner, name, _as_function(call, place.original))


def _as_function(call: Function, original: Function) -> Function:
    """Returns a call as a function: torch's compiler does not follow the name of a partial."""

    @functools.wraps(original)
    def hooked(*args: object, **kwargs: object) -> Any:
        return call(*args, **kwargs)

    # Keras reads the arguments of a layer's `__init__` without following `__wrapped__`.
    # It copies the attributes of `build` to a function without `self`.
    if original.__name__ != "build":
        hooked.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
    return hooked


def _without_change_of_mask(original: Function) -> Function:
    """Returns an ``apply_mask`` that does not change the mask, as from Keras 3.15 on."""

    @functools.wraps(original)
    def apply_mask(sample_weight: object, mask: object, **options: object) -> Any:
        return original(sample_weight, None if mask is None else ops.copy(mask), **options)

    return apply_mask
