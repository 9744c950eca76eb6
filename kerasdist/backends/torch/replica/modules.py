"""Gives a torch module the parameters of the replica that runs the module.

Keras reads its variables through the replica's scope, but torch's code takes parameters from the
modules. So each method of a Keras layer that returns parameters is replaced by a method that
returns the replica's values of these parameters.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import keras
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from kerasdist import keras_compat
from kerasdist.backends.torch.replica.collectives import collectives_here
from kerasdist.backends.torch.state.reads import ReadRecorder
from kerasdist.backends.torch.state.variables import ReplicaScope
from kerasdist.core.context import current
from kerasdist.errors import ReplicaError, UnsupportedError

# torch's batch normalizations, and their base class, because users' modules may derive from it.
_BATCH_NORMS = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    *(nn.LazyBatchNorm1d, nn.LazyBatchNorm2d, nn.LazyBatchNorm3d),
    *(one for one in nn.BatchNorm1d.__mro__[1:2] if one is not nn.Module),
)

# The modules whose code a replica is running. Replicas take turns, so a replica normally calls only
# modules that are not in this set. A module is still in the set only if another replica waits in a
# collective inside of the module.
_in_use: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()


@cache
def install() -> None:
    """Installs hooks that give torch code the replica's parameters, once per process."""
    keras_compat.install(
        named_parameters=partial(_lead, _named_parameters),
        module_parameters=partial(_lead, _wrapped_parameters),
        module_call=partial(_lead, _call_module),
    )
    register_optimizer_step_pre_hook(_refuse_torch_optimizer)


def _lead(
    in_replica: Callable[..., Any],
    original: Callable[..., Any],
    layer: keras.Layer,
    *args: object,
    **kwargs: object,
) -> Any:
    """In a replica, calls `in_replica` with the replica's scope; elsewhere calls Keras's method."""
    scope = scope_here()
    if scope is None:
        return original(layer, *args, **kwargs)
    return in_replica(original, scope, layer, *args, **kwargs)


def scope_here() -> Any:
    """Returns the scope of the replica or of the `Trial` whose code is running, or None."""
    collectives = collectives_here()
    return current.trial if collectives is None else collectives.scope


def _named_parameters(
    original: Callable[..., Any],
    scope: ReplicaScope,
    layer: keras.Layer,
    *args: object,
    **kwargs: object,
) -> Iterator[tuple[str, Any]]:
    values = _values_by_parameter(scope, layer)
    # The first call of `original` registers parameters with torch. These must be the variables' own
    # values, and not a replica's values. So `original` runs outside of scopes.
    with keras_compat.outside_stateless_scopes():
        parameters = original(layer, *args, **kwargs)
    for name, parameter in parameters:
        yield name, values.get(id(parameter), parameter)


def _wrapped_parameters(
    original: Callable[..., Any],
    scope: ReplicaScope,
    wrapper: keras.layers.TorchModuleWrapper,
    *args: object,
    **kwargs: object,
) -> Iterator[Any]:
    values = _values_by_parameter(scope, wrapper)
    for parameter in original(wrapper, *args, **kwargs):
        yield values.get(id(parameter), parameter)


def _call_module(
    original: Callable[..., Any],
    scope: ReplicaScope,
    wrapper: keras.layers.TorchModuleWrapper,
    *args: object,
    training: bool | None = None,
    **kwargs: object,
) -> Any:
    module = wrapper.module
    wrapper.train(training is not False)
    buffers = _buffers(scope, module)
    if scope.is_only and current.trial is None:  # the only replica uses the module's own tensors
        return original(wrapper, *args, training=training, **kwargs)
    values = _values_by_parameter(scope, wrapper)
    tensors: dict[str, Any] = {name: values.get(id(p), p) for name, p in module.named_parameters()}
    tensors.update(buffers)
    if module in _in_use:
        raise ReplicaError(
            "Expected the replicas to pass through a torch module one after another. Received: "
            f"module={type(module).__name__}, held by another replica. A torch module cannot use a "
            "collective (kd.global_batch, a Keras BatchNormalization); use the collective in a "
            "Keras layer around the module."
        )
    _in_use.add(module)
    try:
        return torch.func.functional_call(module, tensors, args, kwargs)
    finally:
        _in_use.discard(module)


def _buffers(scope: ReplicaScope, module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Returns a replica's buffers of a module. In training these are copies, which may change."""
    _refuse_own_batch_norm(module)
    return {name: scope.buffer(buffer, module.training) for name, buffer in module.named_buffers()}


def _refuse_own_batch_norm(module: torch.nn.Module) -> None:
    replica = current.fit_replica
    if replica is None or replica.strategy.options.batch_norm == "per_replica":
        return
    for inner in module.modules():
        if isinstance(inner, _BATCH_NORMS) and inner.training:
            raise UnsupportedError(
                f"Expected layers that can see the global batch. Received: {type(inner).__name__} "
                "inside a torch module, which sees its replica's rows only. Use "
                "keras.layers.BatchNormalization, torch.nn.GroupNorm, or "
                'MirroredStrategy(batch_norm="per_replica").'
            )


def _values_by_parameter(scope: ReplicaScope, layer: keras.Layer) -> dict[int, torch.Tensor]:
    reader = keras_compat.get_stateless_scope()
    if not isinstance(reader, ReadRecorder):
        reader = scope
    return {
        id(keras_compat.held_value(variable)): reader.get_current_value(variable)
        for variable in layer.variables
    }


def _refuse_torch_optimizer(optimizer: torch.optim.Optimizer, *_: object) -> None:
    replica = current.replica
    if replica is not None and replica.num_replicas_in_sync > 1:
        raise UnsupportedError(
            "Expected a Keras optimizer in the step of a model on several replicas. Received: "
            f"optimizer={type(optimizer).__name__} of torch.optim, which knows nothing of the "
            "other replicas' gradients. Compile the model with keras.optimizers and call "
            "`self.optimizer.apply(gradients, variables)`."
        )
