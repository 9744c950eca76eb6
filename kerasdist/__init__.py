"""Distributed training for Keras 3 on TensorFlow, JAX and PyTorch, with the results of one device.

Importing this package imports no framework. When a script first uses a public name such as
`kerasdist.MirroredStrategy`, this file imports `kerasdist.public`, which imports Keras and the
framework.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kerasdist.core import __version__
from kerasdist.core.earlier_names import ADVICE, RENAMED, look_up

if TYPE_CHECKING:
    from kerasdist import callbacks, cluster, config, errors, experimental
    from kerasdist.cli.launch.function import launch
    from kerasdist.public import *

__all__ = [
    "AutoShardPolicy",
    "CentralStorageStrategy",
    "CommunicationImplementation",
    "CommunicationOptions",
    "DeviceAssignment",
    "DistributedDataset",
    "DistributedIterator",
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
    "cluster_resolver",
    "compare_with_one_device",
    "compute_average_loss",
    "config",
    "connect_to_cluster",
    "describe_layout",
    "errors",
    "experimental",
    "experimental_set_strategy",
    "function",
    "get_loss_reduction",
    "get_replica_context",
    "get_strategy",
    "global_batch",
    "has_strategy",
    "in_cross_replica_context",
    "launch",
    "load_checkpoint",
    "predict_to",
    "print",
    "save_checkpoint",
    "scale_regularization_loss",
    "tpu",
    "value_and_grad",
]


def __getattr__(name: str) -> Any:
    if name in ("callbacks", "cluster", "config", "errors", "experimental"):
        return importlib.import_module(f"kerasdist.{name}")
    if name == "launch":  # needs no framework, so `kerasdist.public` is not imported
        return importlib.import_module("kerasdist.cli.launch.function").launch
    name = look_up(name, RENAMED, "kerasdist") or name
    if name not in __all__:
        raise AttributeError(_hint(name))
    choice = importlib.import_module("kerasdist.core.backend_choice")
    # This check comes before the import of `kerasdist.public`. With a Keras that is too old, the
    # import would fail, because this Keras lacks names that kerasdist imports.
    choice.require_supported()
    try:
        public = importlib.import_module("kerasdist.public")
    except (ImportError, ValueError) as error:
        problem = choice.backend_choice().problem
        if problem is None:
            raise
        raise importlib.import_module("kerasdist.errors").BackendError(problem) from error
    value = getattr(public, name)
    globals()[name] = value
    return value


def _hint(name: str) -> str:
    """Returns the error message for a name that `kerasdist` does not have.

    The message suggests what to write instead, if kerasdist knows a suitable name.
    """
    said = f"module 'kerasdist' has no attribute {name!r}."
    advice = look_up(name, ADVICE, "kerasdist")
    if advice is not None:
        return f"{said} {advice}"
    import difflib  # imported only here, because its import takes 2 ms

    by_lower = {known.lower(): known for known in __all__}
    near = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.7)
    return f"{said} Did you mean kerasdist.{by_lower[near[0]]}?" if near else said


def __dir__() -> list[str]:
    return sorted(__all__)
