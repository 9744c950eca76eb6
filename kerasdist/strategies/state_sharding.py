"""The argument `sharding` of strategies."""

from __future__ import annotations

import math
from typing import Any, get_args

import numpy as np

from kerasdist import keras_compat
from kerasdist.backends.base.options import ReplicaOptions
from kerasdist.core.sharding import Divided, Sharding

ShardingOption = Any
"""None, ``"optimizer"``, ``"full"``, a `Sharding` or a ``keras.distribution.LayoutMap``."""


def options_with(sharding: ShardingOption, **options: Any) -> ReplicaOptions:
    """Returns the options of a strategy with its argument `sharding`, checked."""
    checked = checked_sharding(sharding)
    is_map = keras_compat.is_layout_map(checked)
    per_replica = _devices_per_replica(checked) if is_map else 1
    return ReplicaOptions(sharding=checked, devices_per_replica=per_replica, **options)


def checked_sharding(sharding: ShardingOption) -> Any:
    """Returns a strategy's argument `sharding`, if it is valid.

    Args:
        sharding: The argument.

    Returns:
        None, a `Sharding`, or a ``keras.distribution.LayoutMap``.
    """
    if sharding is None:
        return None
    choices = get_args(Divided)
    is_map = keras_compat.is_layout_map(sharding)
    if not is_map and not isinstance(sharding, Sharding) and sharding not in choices:
        raise ValueError(
            f"Expected sharding to be None, one of {list(choices)}, a kerasdist.Sharding or a "
            f"keras.distribution.LayoutMap. Received: sharding={sharding!r:.200}."
        )
    if is_map:
        _check_mesh(sharding)
    return sharding if is_map or isinstance(sharding, Sharding) else Sharding(sharding)


def described(sharding: Any) -> str:
    """Returns in words what a checked argument says, which is to be the same on all workers."""
    if not keras_compat.is_layout_map(sharding):
        return repr(sharding)
    mesh = sharding.device_mesh
    sizes = dict(zip(mesh.axis_names, mesh.shape, strict=True))
    devices = [str(one) for one in np.ravel(mesh.devices)]
    layouts = {key: layout.axes for key, layout in sharding.items()}
    return f"LayoutMap({layouts}), over a mesh of {sizes}, {devices}"


def _devices_per_replica(layout_map: Any) -> int:
    return math.prod(layout_map.device_mesh.shape[1:])


def _check_mesh(layout_map: Any) -> None:
    mesh = layout_map.device_mesh
    if mesh is None or len(mesh.shape) < 2:
        has = None if mesh is None else dict(zip(mesh.axis_names, mesh.shape, strict=True))
        raise ValueError(
            "Expected a LayoutMap over a keras.distribution.DeviceMesh whose first axis divides "
            "the batch, and whose other axes divide variables, such as DeviceMesh((2, 2), "
            f"('batch', 'model'), devices). Received: sharding=LayoutMap, over a mesh of {has}."
        )
