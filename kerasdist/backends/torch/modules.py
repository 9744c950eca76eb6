"""torch's own modules in a replica: whoever asks for parameters gets the replica's.

Keras reads its variables through the replica's scope. torch's code takes parameters from the
modules instead, so each way to them that a Keras layer offers leads through the scope here.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import keras
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from kerasdist import context, keras_seam
from kerasdist.backends.torch.collectives import TorchCollectives
from kerasdist.backends.torch.reads import ReadRecorder
from kerasdist.backends.torch.variables import ReplicaScope
from kerasdist.errors import ReplicaError, UnsupportedError
from kerasdist.replica_context import one_device_replica

# A module that uses a collective inside would make another replica wait here, for nothing.
_WAIT_SECONDS = 60.0

# One replica at a time can put its tensors into a module; they take turns.
_in_use: weakref.WeakKeyDictionary[torch.nn.Module, threading.Lock] = weakref.WeakKeyDictionary()


@cache
def install() -> None:
    """Leads the ways to parameters through the replica's scope, once in a process."""
    _lead(keras.layers.Layer, "named_parameters", _named_parameters)
    _lead(keras.layers.Layer, "zero_grad", _zero_grad)
    _lead(keras.layers.TorchModuleWrapper, "parameters", _wrapped_parameters)
    _lead(keras.layers.TorchModuleWrapper, "call", _call_module)
    refuse_torch_optimizers()


@cache
def refuse_torch_optimizers() -> None:
    """Refuses torch's own optimizers in a replica, once in a process."""
    register_optimizer_step_pre_hook(_refuse_torch_optimizer)


def _lead(owner: type, name: str, in_replica: Callable[..., Any]) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def lead(layer: Any, *args: Any, **kwargs: Any) -> Any:
        replica = context.replica()
        if replica is None or not isinstance(replica.collectives, TorchCollectives):
            return original(layer, *args, **kwargs)
        return in_replica(original, replica.collectives.scope, layer, *args, **kwargs)

    setattr(owner, name, lead)


def _zero_grad(original: Any, scope: ReplicaScope, layer: Any, set_to_none: bool = True) -> None:
    scope.clear_gradients(layer.trainable_variables)


def _named_parameters(
    original: Any, scope: ReplicaScope, layer: Any, *args: Any, **kwargs: Any
) -> Iterator[tuple[str, Any]]:
    values = _values_by_parameter(scope, layer)
    with keras_seam.outside_stateless_scopes():  # the first call hands torch the layer's variables
        parameters = original(layer, *args, **kwargs)
    for name, parameter in parameters:
        yield name, values.get(id(parameter), parameter)


def _wrapped_parameters(
    original: Any, scope: ReplicaScope, wrapper: Any, *args: Any, **kwargs: Any
) -> Iterator[Any]:
    values = _values_by_parameter(scope, wrapper)
    for parameter in original(wrapper, *args, **kwargs):
        yield values.get(id(parameter), parameter)


def _call_module(
    original: Any,
    scope: ReplicaScope,
    wrapper: Any,
    *args: Any,
    training: Any = None,
    **kwargs: Any,
) -> Any:
    module = wrapper.module
    wrapper.train(training is not False)
    values = _values_by_parameter(scope, wrapper)
    tensors: dict[str, Any] = {name: values.get(id(p), p) for name, p in module.named_parameters()}
    tensors.update(_buffers(scope, module))
    lock = _in_use.setdefault(module, threading.Lock())
    if not lock.acquire(timeout=_WAIT_SECONDS):
        raise ReplicaError(
            "Expected the replicas to pass through a torch module one after another. Received: "
            f"module={type(module).__name__}, held by another replica for {_WAIT_SECONDS} "
            "seconds. A torch module cannot use a collective (kd.global_batch, a Keras "
            "BatchNormalization); do that in a Keras layer around it."
        )
    try:
        return torch.func.functional_call(module, tensors, args, kwargs)
    finally:
        lock.release()


def _buffers(scope: ReplicaScope, module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The replica's buffers of a module: in training copies, which the module may change."""
    refuse_own_batch_norm(module)
    return {name: scope.buffer(buffer, module.training) for name, buffer in module.named_buffers()}


def refuse_own_batch_norm(module: torch.nn.Module) -> None:
    """Refuses torch's own batch normalization where the batch to normalize is the global one.

    Args:
        module: A module that a replica calls.

    Raises:
        UnsupportedError: If it has one, in training, and the one-device contract holds.
    """
    replica = one_device_replica()
    if replica is None or replica.strategy.options.batch_norm == "per_replica":
        return
    for inner in module.modules():
        if isinstance(inner, torch.nn.modules.batchnorm._BatchNorm) and inner.training:
            raise UnsupportedError(
                f"Expected layers that can see the global batch. Received: {type(inner).__name__} "
                "inside a torch module, which sees its replica's rows only. Use "
                "keras.layers.BatchNormalization, torch.nn.GroupNorm, or "
                'MirroredStrategy(batch_norm="per_replica").'
            )


def _values_by_parameter(scope: ReplicaScope, layer: Any) -> dict[int, torch.Tensor]:
    reader = keras_seam.stateless_scope()
    if not isinstance(reader, ReadRecorder):
        reader = scope
    return {
        id(keras_seam.stored_value(variable)): reader.get_current_value(variable)
        for variable in layer.variables
    }


def _refuse_torch_optimizer(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    replica = context.replica()
    if replica is not None and replica.num_replicas_in_sync > 1:
        raise UnsupportedError(
            "Expected a Keras optimizer in the step of a model on several replicas. Received: "
            f"optimizer={type(optimizer).__name__} of torch.optim, which knows nothing of the "
            "other replicas' gradients. Compile the model with keras.optimizers and call "
            "`self.optimizer.apply(gradients, variables)`."
        )
