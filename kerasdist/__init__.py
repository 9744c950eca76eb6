"""Distributed training for Keras 3 on TensorFlow, JAX and PyTorch, with the numbers of one device.

Importing this package imports no framework; a public name is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kerasdist.core import __version__

if TYPE_CHECKING:
    from kerasdist import callbacks, cluster, config, errors, experimental
    from kerasdist.api.extended import StrategyExtended
    from kerasdist.api.functions import function, value_and_grad
    from kerasdist.api.losses import compute_average_loss, scale_regularization_loss
    from kerasdist.api.options import (
        CommunicationImplementation,
        CommunicationOptions,
        ReduceOp,
        RunOptions,
    )
    from kerasdist.api.replica_context import ReplicaContext, global_batch
    from kerasdist.api.scopes import (
        get_replica_context,
        get_strategy,
        has_strategy,
        in_cross_replica_context,
        print,
    )
    from kerasdist.api.strategy import Strategy
    from kerasdist.api.values import DistributedValues, Mirrored, PerReplica
    from kerasdist.check.report import OneDeviceComparison, compare_with_one_device
    from kerasdist.core.partitions import DeviceAssignment
    from kerasdist.core.sharding import Sharding
    from kerasdist.input.distributed import DistributedDataset
    from kerasdist.input.options import (
        AutoShardPolicy,
        InputContext,
        InputOptions,
        InputReplicationMode,
        ValueContext,
    )
    from kerasdist.launch.function import launch
    from kerasdist.strategies.mirrored import (
        CentralStorageStrategy,
        MirroredStrategy,
        OneDeviceStrategy,
        auto,
    )
    from kerasdist.strategies.multi_worker import MultiWorkerMirroredStrategy
    from kerasdist.strategies.tpu import TPUStrategy
    from kerasdist.training.predictions import predict_to

__all__ = [
    "AutoShardPolicy",
    "CentralStorageStrategy",
    "CommunicationImplementation",
    "CommunicationOptions",
    "DeviceAssignment",
    "DistributedDataset",
    "DistributedValues",
    "InputContext",
    "InputOptions",
    "InputReplicationMode",
    "Mirrored",
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "OneDeviceComparison",
    "OneDeviceStrategy",
    "PerReplica",
    "ReduceOp",
    "ReplicaContext",
    "RunOptions",
    "Sharding",
    "Strategy",
    "StrategyExtended",
    "TPUStrategy",
    "ValueContext",
    "__version__",
    "auto",
    "callbacks",
    "cluster",
    "compare_with_one_device",
    "compute_average_loss",
    "config",
    "errors",
    "experimental",
    "function",
    "get_replica_context",
    "get_strategy",
    "global_batch",
    "has_strategy",
    "in_cross_replica_context",
    "launch",
    "predict_to",
    "print",
    "scale_regularization_loss",
    "value_and_grad",
]

_HOMES = {
    "AutoShardPolicy": "kerasdist.input.options",
    "CentralStorageStrategy": "kerasdist.strategies.mirrored",
    "DeviceAssignment": "kerasdist.core.partitions",
    "TPUStrategy": "kerasdist.strategies.tpu",
    "CommunicationImplementation": "kerasdist.api.options",
    "CommunicationOptions": "kerasdist.api.options",
    "DistributedDataset": "kerasdist.input.distributed",
    "DistributedValues": "kerasdist.api.values",
    "InputContext": "kerasdist.input.options",
    "InputOptions": "kerasdist.input.options",
    "InputReplicationMode": "kerasdist.input.options",
    "Mirrored": "kerasdist.api.values",
    "MirroredStrategy": "kerasdist.strategies.mirrored",
    "MultiWorkerMirroredStrategy": "kerasdist.strategies.multi_worker",
    "OneDeviceComparison": "kerasdist.check.report",
    "OneDeviceStrategy": "kerasdist.strategies.mirrored",
    "PerReplica": "kerasdist.api.values",
    "ReduceOp": "kerasdist.api.options",
    "ReplicaContext": "kerasdist.api.replica_context",
    "RunOptions": "kerasdist.api.options",
    "Sharding": "kerasdist.core.sharding",
    "Strategy": "kerasdist.api.strategy",
    "StrategyExtended": "kerasdist.api.extended",
    "ValueContext": "kerasdist.input.options",
    "auto": "kerasdist.strategies.mirrored",
    "compare_with_one_device": "kerasdist.check.report",
    "compute_average_loss": "kerasdist.api.losses",
    "function": "kerasdist.api.functions",
    "get_replica_context": "kerasdist.api.scopes",
    "get_strategy": "kerasdist.api.scopes",
    "global_batch": "kerasdist.api.replica_context",
    "has_strategy": "kerasdist.api.scopes",
    "predict_to": "kerasdist.training.predictions",
    "print": "kerasdist.api.scopes",
    "in_cross_replica_context": "kerasdist.api.scopes",
    "scale_regularization_loss": "kerasdist.api.losses",
    "value_and_grad": "kerasdist.api.functions",
}


# Names of tf.distribute and other libraries, and what to use here.
_ELSEWHERE = {
    "ParameterServerStrategy": (
        "kerasdist trains synchronously, without parameter servers. Use "
        "kerasdist.MultiWorkerMirroredStrategy(), or kerasdist.CentralStorageStrategy() to keep "
        "the variables of one machine on one device."
    ),
    "HierarchicalCopyAllReduce": "The backend chooses the collectives by itself.",
    "NcclAllReduce": "The backend chooses the collectives by itself: NCCL between NVIDIA GPUs.",
    "ReductionToOneDevice": "The backend chooses the collectives by itself.",
    "CrossDeviceOps": "The backend chooses the collectives by itself.",
    "init": "There is nothing to initialize: make a strategy, for example kerasdist.auto().",
}


def __getattr__(name: str) -> Any:
    if name in ("callbacks", "cluster", "config", "errors", "experimental", "launch"):
        return importlib.import_module(f"kerasdist.{name}")
    if name not in _HOMES:
        raise AttributeError(_hint(name))
    try:
        home = importlib.import_module(_HOMES[name])
    except (ImportError, ValueError) as error:
        problem = importlib.import_module("kerasdist.core.backend_choice").backend_choice().problem
        if problem is None:
            raise
        raise importlib.import_module("kerasdist.errors").BackendError(problem) from error
    value = getattr(home, name)
    globals()[name] = value
    return value


def _hint(name: str) -> str:
    """Returns the advice for a name that does not exist here."""
    said = f"module 'kerasdist' has no attribute {name!r}."
    if name in _ELSEWHERE:
        return f"{said} {_ELSEWHERE[name]}"
    import difflib  # imported here, since it takes 2 ms

    by_lower = {known.lower(): known for known in __all__}
    near = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.7)
    return f"{said} Did you mean kerasdist.{by_lower[near[0]]}?" if near else said


def __dir__() -> list[str]:
    return sorted(__all__)
