"""Checks the arguments that strategies share: `batch_norm`, `check`, `sharding` and `offload`."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, cast, get_args

import numpy as np

from kerasdist.api.options import CommunicationOptions, require_choice
from kerasdist.backends.base.collectives import DEFAULT_COMMUNICATION
from kerasdist.backends.base.interface import BatchNorm, Check, ReplicaOptions
from kerasdist.cluster.resolver import ClusterResolver
from kerasdist.core.devices import Device
from kerasdist.core.earlier_names import refuse_arguments
from kerasdist.core.sharding import Divided, Offload, Sharding
from kerasdist.keras_compat import LayoutMap

CHECK_VARIABLE = "KERASDIST_CHECK"

_NUMBERS = ("num_gpus", "num_gpus_per_worker")

ShardingOption = Any
"""The values of `sharding`: None, a `Sharding` or its name, a ``keras.distribution.LayoutMap``."""


def replica_options(
    sharding: ShardingOption = None,
    batch_norm: BatchNorm | None = None,
    check: Check | None = None,
    parameter_device: Device | None = None,
    *,
    communication: CommunicationOptions = DEFAULT_COMMUNICATION,
    offload: Offload | None = None,
) -> ReplicaOptions:
    """Checks the arguments of a strategy, and returns them as the options of replicas.

    Args:
        sharding: None, a `Sharding` or its name, or a ``keras.distribution.LayoutMap``.
        batch_norm: The same as in `ReplicaOptions`.
        check: The same as in `ReplicaOptions`; None means the value of ``KERASDIST_CHECK``.
        parameter_device: The same as in `ReplicaOptions`.
        communication: The same as in `ReplicaOptions`.
        offload: The same as in `ReplicaOptions`.

    Raises:
        ValueError: If an argument has none of its allowed values.
    """
    require_choice("batch_norm", batch_norm, (None, *get_args(BatchNorm)))
    require_choice("offload", offload, (None, *get_args(Offload)))
    checked = _checked_sharding(sharding)
    is_map = isinstance(checked, LayoutMap)
    return ReplicaOptions(
        batch_norm=batch_norm,
        parameter_device=parameter_device,
        devices_per_replica=math.prod(checked.device_mesh.shape[1:]) if is_map else 1,
        check=_checked_check(check),
        sharding=checked,
        communication=communication,
        offload=offload,
    )


def _checked_check(check: Check | None) -> Check:
    """Returns a strategy's argument `check`; if it is None, the value of ``KERASDIST_CHECK``."""
    name, said = "check", check
    if check is None:
        name, said = CHECK_VARIABLE, os.environ.get(CHECK_VARIABLE) or "warn"
    require_choice(name, said, get_args(Check))
    return cast("Check", said)


def _checked_sharding(sharding: ShardingOption) -> Any:
    """Returns the argument `sharding` if it is valid: None, a `Sharding`, or a LayoutMap."""
    choices = get_args(Divided)
    if isinstance(sharding, LayoutMap):
        _check_mesh(sharding)
    elif sharding in choices:
        return Sharding(sharding)
    elif sharding is not None and not isinstance(sharding, Sharding):
        raise ValueError(
            f"Expected sharding to be None, one of {list(choices)}, a kerasdist.Sharding or a "
            f"keras.distribution.LayoutMap. Received: sharding={sharding!r:.200}. Pass the "
            "layout_map of a keras.distribution.ModelParallel; leave out a DataParallel, because "
            "a strategy does the same."
        )
    return sharding


def named_devices(
    devices: Sequence[str] | None, earlier: Mapping[str, Any]
) -> Sequence[str] | None:
    """Returns the argument `devices`; if the user gave a number of GPUs, the names of these GPUs.

    The first versions of ``tf.distribute``, from the year 2018, took a number of GPUs in place of
    names of devices. kerasdist still accepts such a number.

    Args:
        devices: Names of devices, or None.
        earlier: The user's other arguments. `num_gpus` and `num_gpus_per_worker` give the number of
            GPUs. Any other argument must be an argument of ``tf.distribute``, and must have a value
            that changes nothing in kerasdist.

    Raises:
        TypeError: If ``tf.distribute`` never had an argument in `earlier`, or if both `devices` and
            a number are given.
        UnsupportedError: If an argument in `earlier` asks for something that kerasdist does not do.
    """
    numbers = {k: n for k, n in earlier.items() if k.startswith("num_gpus") and n is not None}
    refuse_arguments("a strategy", {k: v for k, v in earlier.items() if k not in _NUMBERS})
    if not numbers:
        return devices
    if devices is not None or len(numbers) > 1:
        raise TypeError(
            "Expected one of devices, num_gpus and num_gpus_per_worker. Received: "
            f"devices={devices!r}, {numbers}. Name the devices: devices=['gpu:0', 'gpu:1']."
        )
    [count] = numbers.values()
    return [f"gpu:{index}" for index in range(count)] or ["cpu:0"]


def checked_resolver(given: object) -> ClusterResolver | None:
    """Returns the argument `cluster_resolver`, after a check that it is a resolver or None."""
    if given is None or isinstance(given, ClusterResolver):
        return given
    raise TypeError(
        "Expected a kerasdist.cluster.ClusterResolver or None. Received: cluster_resolver="
        f"{given!r:.200}. Make one from a cluster's addresses: kerasdist.cluster."
        "SimpleClusterResolver(cluster_spec, task_type, task_id). Collectives are chosen by "
        "communication_options=kerasdist.CommunicationOptions(implementation=...)."
    )


def described(sharding: Any) -> str:
    """Returns the checked argument `sharding` as a text, which the workers compare."""
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
