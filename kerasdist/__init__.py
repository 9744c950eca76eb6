"""Distributed training for Keras 3 on TensorFlow, JAX and PyTorch, with the numbers of one device.

Importing this package imports no framework; a public name is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kerasdist import config, errors
    from kerasdist.context import (
        get_replica_context,
        get_strategy,
        has_strategy,
        in_cross_replica_context,
    )
    from kerasdist.replica_context import ReplicaContext, global_batch
    from kerasdist.strategies.auto import auto
    from kerasdist.strategies.mirrored import MirroredStrategy
    from kerasdist.strategies.one_device import OneDeviceStrategy
    from kerasdist.strategy import Strategy

__version__ = "0.1.0"

__all__ = [
    "MirroredStrategy",
    "OneDeviceStrategy",
    "ReplicaContext",
    "Strategy",
    "__version__",
    "auto",
    "config",
    "errors",
    "get_replica_context",
    "get_strategy",
    "global_batch",
    "has_strategy",
    "in_cross_replica_context",
]

_HOMES = {
    "MirroredStrategy": "kerasdist.strategies.mirrored",
    "OneDeviceStrategy": "kerasdist.strategies.one_device",
    "ReplicaContext": "kerasdist.replica_context",
    "Strategy": "kerasdist.strategy",
    "auto": "kerasdist.strategies.auto",
    "get_replica_context": "kerasdist.context",
    "get_strategy": "kerasdist.context",
    "global_batch": "kerasdist.replica_context",
    "has_strategy": "kerasdist.context",
    "in_cross_replica_context": "kerasdist.context",
}


def __getattr__(name: str) -> Any:
    if name in ("config", "errors"):
        return importlib.import_module(f"kerasdist.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'kerasdist' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
