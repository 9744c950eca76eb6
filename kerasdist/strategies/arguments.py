"""The arguments that strategies share: `batch_norm`, `check` and `sharding`."""

from __future__ import annotations

import math
import os
from typing import Any, cast, get_args

import numpy as np

from kerasdist.api.options import CommunicationOptions, require_choice
from kerasdist.backends.base.collectives import DEFAULT_COMMUNICATION
from kerasdist.backends.base.interface import BatchNorm, Check, ReplicaOptions
from kerasdist.core.devices import Device
from kerasdist.core.sharding import Divided, Sharding
from kerasdist.keras_compat import LayoutMap

CHECK_VARIABLE = "KERASDIST_CHECK"

ShardingOption = Any
"""None, ``"optimizer"``, ``"full"``, a `Sharding` or a ``keras.distribution.LayoutMap``."""


def replica_options(
    sharding: ShardingOption = None,
    batch_norm: BatchNorm | None = None,
    check: Check | None = None,
    parameter_device: Device | None = None,
    communication: CommunicationOptions = DEFAULT_COMMUNICATION,
) -> ReplicaOptions:
    """Returns the options of a strategy from its arguments, checked.

    Args:
        sharding: None, a `Sharding` or its name, or a ``keras.distribution.LayoutMap``.
        batch_norm: As in `ReplicaOptions`.
        check: The same; None: the environment variable's value.
        parameter_device: As in `ReplicaOptions`.
        communication: The same.

    Raises:
        ValueError: If an argument is not one of its choices.
    """
    require_choice("batch_norm", batch_norm, (None, *get_args(BatchNorm)))
    checked = _checked_sharding(sharding)
    is_map = isinstance(checked, LayoutMap)
    return ReplicaOptions(
        batch_norm=batch_norm,
        parameter_device=parameter_device,
        devices_per_replica=math.prod(checked.device_mesh.shape[1:]) if is_map else 1,
        check=_checked_check(check),
        sharding=checked,
        communication=communication,
    )


def _checked_check(check: Check | None) -> Check:
    """Returns a strategy's argument `check`; if it is None, the environment variable's value."""
    name, said = "check", check
    if check is None:
        name, said = CHECK_VARIABLE, os.environ.get(CHECK_VARIABLE) or "warn"
    require_choice(name, said, get_args(Check))
    return cast("Check", said)


def _checked_sharding(sharding: ShardingOption) -> Any:
    """Returns the argument `sharding`, if it is valid: None, a `Sharding`, or a LayoutMap."""
    choices = get_args(Divided)
    if isinstance(sharding, LayoutMap):
        _check_mesh(sharding)
    elif sharding in choices:
        return Sharding(sharding)
    elif sharding is not None and not isinstance(sharding, Sharding):
        raise ValueError(
            f"Expected sharding to be None, one of {list(choices)}, a kerasdist.Sharding or a "
            f"keras.distribution.LayoutMap. Received: sharding={sharding!r:.200}. Of a "
            "keras.distribution.ModelParallel pass its layout_map; what its DataParallel does, a "
            "strategy does by itself."
        )
    return sharding


def described(sharding: Any) -> str:
    """Returns in words what a checked argument says, which is to be the same on all workers."""
    if not isinstance(sharding, LayoutMap):
        return repr(sharding)
    mesh = sharding.device_mesh
    sizes = dict(zip(mesh.axis_names, mesh.shape, strict=True))
    devices = [str(one) for one in np.ravel(mesh.devices)]
    layouts = {key: layout.axes for key, layout in sharding.items()}
    return f"LayoutMap({layouts}), over a mesh of {sizes}, {devices}"


def _check_mesh(layout_map: Any) -> None:
    mesh = layout_map.device_mesh
    if mesh is None or len(mesh.shape) < 2:
        has = None if mesh is None else dict(zip(mesh.axis_names, mesh.shape, strict=True))
        raise ValueError(
            "Expected a LayoutMap over a keras.distribution.DeviceMesh whose first axis divides "
            "the batch, and whose other axes divide variables, such as DeviceMesh((2, 2), "
            f"('batch', 'model'), devices). Received: sharding=LayoutMap, over a mesh of {has}."
        )
