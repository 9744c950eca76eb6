"""The hooks into Keras: a function for each place in Keras that differs under a strategy.

`install` installs the hooks when the first strategy is made. Outside of a strategy's models and
replicas, every hook computes what plain Keras computes, and may also warn or raise an error.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import cache, partial
from typing import TYPE_CHECKING, Any, cast

import keras
import numpy as np

from kerasdist import keras_compat
from kerasdist.agreement import description
from kerasdist.backends.base.model_trainer import TRAINER, TrainerLike, trainer_of
from kerasdist.backends.base.variable_rules import (
    WithoutCommonValue,
    never_synchronized,
    require_first_made,
)
from kerasdist.callbacks import on_workers
from kerasdist.callbacks.backup.position import Position, PositionedAdapter
from kerasdist.core import ownership
from kerasdist.core.context import current, placements_left, scoped_strategy
from kerasdist.input.distributed import DistributedDataset, distributed, shards_itself
from kerasdist.input.fit_adapter import as_plain_keras, whole
from kerasdist.input.options import InputOptions
from kerasdist.input.sharding import lists_weights
from kerasdist.training import (
    batch_norm,
    layer_losses,
    metrics,
    numerics,
    outside,
    randomness,
    saving,
    worker_agreement,
)
from kerasdist.training.binding import bind
from kerasdist.training.trainer import STEPS, ReplicatedTrainer, require_made, watch_functions

if TYPE_CHECKING:
    from kerasdist.api.strategy import Strategy

Original = Callable[..., Any]
_NUMBERS = (int, float, np.number)


@cache
def install() -> None:
    """Installs the hooks, once per process."""
    keras_compat.leave_accelerators()
    keras_compat.install(
        model_created=_model_created,
        metric_created=metrics.metric_created,
        variable_created=_variable_created,
        compile=_compile,
        save=saving.save,
        export=saving.save,
        refuse_save=saving.refuse_save,
        fit=_fit,
        evaluate=_evaluate,
        on_batch=_on_batch,
        apply=_apply,
        scale_by_optimizer=_scale_by_optimizer,
        call_loss=numerics.call_loss,
        reduce_loss=numerics.reduce_loss,
        scale_loss=partial(_scale_loss, operator.truediv),
        unscale_loss=partial(_scale_loss, operator.mul),
        batch_norm_created=batch_norm.layer_created,
        batch_norm_called=batch_norm.called,
        batch_moments=batch_norm.moments,
        draw_seed=randomness.draw_seed,
        draw_rows=randomness.draw_rows,
        add_loss=layer_losses.add_loss,
        losses=layer_losses.losses,
        clear_losses=layer_losses.clear_losses,
    )


@cache
def _install_trainer(trainer_class: type[ReplicatedTrainer]) -> None:
    """Installs hooks that call methods of a model's trainer in place of the model's methods."""
    names = (*STEPS, *trainer_class.HOOKED)
    keras_compat.install(**{name: _by_trainer(name) for name in names})


def _by_trainer(name: str) -> keras_compat.Method:
    """Returns a hook that calls the trainer's method in place of the model's method."""

    def make(original: Original) -> Original:
        def method(model: Any, *args: object, **kwargs: object) -> Any:
            trainer = vars(model).get(TRAINER)
            if trainer is None:
                return original(model, *args, **kwargs)
            if name in STEPS:
                return trainer.make_function(name, partial(original, model), *args, **kwargs)
            return getattr(trainer, name)(partial(original, model), *args, **kwargs)

        return method

    return keras_compat.Method(make)


def _model_created(original: Original, kind: type, *args: object, **kwargs: object) -> Any:
    model = original(kind, *args, **kwargs)
    strategy = scoped_strategy()
    if strategy is not None and strategy.replica_set is not None:
        strategy.is_used = True
        if strategy.num_replicas_in_sync > 1:
            # If Keras lacks what `fit` needs, this raises an error now. Later, Keras would hide the
            # error, because it hides errors while it builds layers.
            keras_compat.require_each_fit()
        trainer_class = strategy.replica_set.trainer_class
        _install_trainer(trainer_class)
        trainer = trainer_class(model, cast("Strategy", strategy), strategy.replica_set)
        object.__setattr__(model, TRAINER, trainer)  # so Keras does not track the trainer
        saving.hook(kind)
    return model


def _variable_created(
    original: Original, variable: keras.Variable, *args: object, **kwargs: object
) -> None:
    strategy = scoped_strategy()
    has_copies = strategy is not None and strategy.num_replicas_in_sync > 1
    if has_copies and kwargs.get("synchronization") == "none":
        raise never_synchronized()
    original(variable, *args, **batch_norm.statistics_options(kwargs))
    if current.replica is not None and keras_compat.backend_name() == "torch":
        require_first_made(variable)
    is_apart = variable.synchronization == "on_read" and variable.aggregation == "none"
    # Each replica has its own value of such a variable, so a read outside of a replica must raise
    # an error. On TensorFlow, the `tf.Variable` itself raises it.
    if has_copies and is_apart and keras_compat.backend_name() != "tensorflow":
        bind(variable, WithoutCommonValue)
    if strategy is not None:
        keras_compat.internals.VALUE.require()
        ownership.record_owner(variable, strategy)
        replicas = strategy.replica_set
        if replicas is not None and replicas.job is not None:
            replicas.initial_broadcast.add(variable)


_METRICS = ("metrics", "weighted_metrics")


def _compile(original: Original, model: keras.Model, *args: object, **kwargs: object) -> Any:
    trainer = trainer_of(model)
    if trainer is None:
        outside.require_no_scope(model)
        return original(model, *args, **kwargs)
    call = inspect.signature(original).bind(model, *args, **kwargs)
    call.apply_defaults()
    _, *given = call.arguments.items()
    description.record_compile(model, dict(given))
    trainer.given_metrics = keras.tree.flatten([dict(given)[name] for name in _METRICS])
    with trainer.strategy.scope():
        return original(model, *args, **kwargs)


def _with_trainer(run: Callable[[Original, TrainerLike, inspect.BoundArguments], Any]) -> Any:
    """Returns a hook that calls `run` for a model with a trainer, and Keras for other models."""

    def hook(original: Original, model: keras.Model, *args: object, **kwargs: object) -> Any:
        trainer, name = trainer_of(model), original.__name__
        if trainer is None:
            outside.warn(model, name)
            if name == "fit":
                outside.take_on(model)
            return _plain(original, model, args, kwargs)
        outside.require_one_distribution(trainer.strategy)
        call = inspect.signature(original).bind(model, *args, **kwargs)
        call.apply_defaults()
        return run(original, trainer, call)

    return hook


@_with_trainer
def _fit(original: Original, trainer: TrainerLike, call: inspect.BoundArguments) -> Any:
    """Runs Keras's own `fit` on the strategy's data adapter, with callbacks of kerasdist added."""
    given, replicas = call.arguments, trainer.replicas
    facts = {} if replicas.job is None else worker_agreement.given(replicas, given)
    if given["validation_split"] and given["validation_data"] is None:
        arrays, given["validation_data"] = keras_compat.internals.SPLIT_ARRAYS.value(
            (given["x"], given["y"], given["sample_weight"]),
            validation_split=given["validation_split"],
        )
        given["x"], given["y"], given["sample_weight"] = arrays
        given["validation_split"] = 0.0
    # If a callback keeps backups, `position` says where in the data a restarted run continues.
    position, validation = on_workers.positions_of(given)
    if given["validation_data"] is not None:
        x, y, weight = keras_compat.unpack_x_y_sample_weight(given["validation_data"])
        given["validation_data"] = _adapted(
            trainer,
            x,
            validation,
            y=y,
            sample_weight=weight,
            batch_size=given["validation_batch_size"] or given["batch_size"],
            steps_per_epoch=given["validation_steps"],
        )
    _adapt(trainer, given, given["steps_per_epoch"], position)
    on_workers.prepare(given, replicas)
    with on_workers.in_fit(given):
        return _run(original, trainer, call, facts)


def _set_verbosity(trainer: TrainerLike, given: dict[str, Any]) -> None:
    """Lets only the chief of a job print.

    In a job ``verbose="auto"`` means one line per epoch, because launchers show no progress bar.
    """
    job = trainer.replicas.job
    if job is not None and not job.is_chief:
        given["verbose"] = 0
    elif job is not None and given["verbose"] == "auto":
        given["verbose"] = 2


@_with_trainer
def _evaluate(original: Original, trainer: TrainerLike, call: inspect.BoundArguments) -> Any:
    replicas = trainer.replicas
    facts = {} if replicas.job is None else worker_agreement.given(replicas, call.arguments)
    _adapt(trainer, call.arguments, call.arguments["steps"])
    return _run(original, trainer, call, facts)


@_with_trainer
def _on_batch(original: Original, trainer: TrainerLike, call: inspect.BoundArguments) -> Any:
    given, weights = call.arguments, call.arguments["sample_weight"]
    if lists_weights(weights, given["y"]) and all(isinstance(one, _NUMBERS) for one in weights):
        given["sample_weight"] = np.array(weights, keras.config.floatx())
    with worker_agreement.working(original.__name__, trainer.replicas, trainer.model):
        logs = original(*call.args, **call.kwargs)
    step = original.__name__.removesuffix("_on_batch")
    require_made(trainer, f"make_{step}_function")
    return logs


def _plain(
    original: Original, model: keras.Model, args: Iterable[Any], kwargs: dict[str, Any]
) -> Any:
    """Calls Keras's own function for a model without a strategy, on data that Keras can read."""

    def given(value: object) -> Any:
        return as_plain_keras(value) if isinstance(value, DistributedDataset) else value

    outside.require_unwrapped()
    with nullcontext() if current.replica else placements_left():
        return original(model, *map(given, args), **{k: given(v) for k, v in kwargs.items()})


def _adapt(
    trainer: TrainerLike, given: dict[str, Any], steps: int | None, position: Position | None = None
) -> None:
    """Replaces the arguments that hold data, such as `x` and `y`, by one data adapter in `x`."""
    taken = ("y", "sample_weight", "shuffle", "class_weight")
    arguments = {name: given[name] for name in taken if name in given}
    arguments.update(batch_size=given["batch_size"], steps_per_epoch=steps)
    given["x"] = _adapted(trainer, given["x"], position, **arguments)
    given.update({name: None for name in taken if name in given and name != "shuffle"})


def _adapted(
    trainer: TrainerLike, x: object, position: Position | None = None, **arguments: object
) -> Any:
    if keras_compat.is_data_adapter(x):
        return x
    job = trainer.replicas.job
    if isinstance(x, DistributedDataset) or (job is not None and shards_itself(x)):
        x = whole(distributed(x, trainer.strategy, InputOptions()), **arguments)
    adapter = keras_compat.get_data_adapter(x, **arguments)
    if position is None:
        return trainer.replicas.data_adapter(adapter)
    position.follow(adapter)
    return PositionedAdapter(trainer.replicas.data_adapter(adapter), position)


def _run(
    original: Original, trainer: TrainerLike, call: inspect.BoundArguments, facts: dict[str, Any]
) -> Any:
    watch_functions(trainer, call.arguments)
    _set_verbosity(trainer, call.arguments)
    replicas, calling = trainer.replicas, nullcontext()
    if replicas.job is not None:
        name = original.__name__
        calling = worker_agreement.calling(name, replicas.job, replicas, call, facts)
    with replicas.placement(), calling:
        return original(*call.args, **call.kwargs)


def _apply(
    original: Original, optimizer: keras.Optimizer, grads: Any, trainable_variables: Any = None
) -> Any:
    replica = current.replica
    variables = None if trainable_variables is None else list(trainable_variables)
    owner = current.trial if replica is None else replica.collectives
    if owner is None or (replica is not None and current.applies):
        return original(optimizer, grads, variables)
    return owner.apply_gradients(original, optimizer, list(grads), variables)


def _scale_by_optimizer(original: Original, optimizer: keras.Optimizer, loss: object) -> Any:
    replica = current.fit_replica
    if replica is None:
        return original(optimizer, loss)
    is_weighted = isinstance(optimizer, keras_compat.LossScaleOptimizer)
    if is_weighted:
        # The loss is multiplied by the replica's fraction of the batch before it is multiplied by
        # the loss scale, so that gradients in float16 stay small.
        loss = numerics.weighted(loss, replica.local_batch.weight)
    loss = original(optimizer, loss)
    return replica.collectives.differentiated_loss(loss, is_weighted=is_weighted)


def _scale_loss(scale: Callable[[Any, int], Any], original: Original, value: Any) -> Any:
    """Divides a mean loss by the number of replicas, or multiplies it if `scale` is `mul`.

    Keras itself does this only on TensorFlow.
    """
    replica = current.replica
    if replica is None or replica.num_replicas_in_sync == 1:
        return original(value)
    # In `fit` this division is not needed: the gradients (or the loss, if there is a
    # LossScaleOptimizer) are multiplied by the replica's fraction of the batch instead.
    return scale(value, replica.num_replicas_in_sync) if replica.local_batch is None else value
