"""The options by which a strategy tells its replicas how to compute."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

from kerasdist.core.devices import Device

BatchNorm = Literal["synchronized", "per_replica"]
Check = Literal["off", "warn", "raise"]
CHECK_VARIABLE = "KERASDIST_CHECK"


@dataclass(frozen=True)
class ReplicaOptions:
    """How a strategy wants its replicas to compute.

    Attributes:
        batch_norm: ``"synchronized"``: BatchNormalization uses the mean and variance of the global
            batch. ``"per_replica"``: each replica uses its own, and the moving statistics are
            averaged. None: synchronized in `fit`, in custom loops as each layer says.
        parameter_device: The device that holds the variables; None: every replica's device.
        devices_per_replica: How many devices a replica has.
        check: What to do if the first training step differs from that of one device.
        sharding: Which variables are divided: a `kerasdist.Sharding`, or a LayoutMap of Keras.
    """

    batch_norm: BatchNorm | None = None
    parameter_device: Device | None = None
    devices_per_replica: int = 1
    check: Check = "warn"
    sharding: Any = None


def checked_batch_norm(batch_norm: BatchNorm | None) -> BatchNorm | None:
    """Returns a strategy's argument `batch_norm`, if it is valid.

    Args:
        batch_norm: The argument.

    Raises:
        ValueError: If it is not one of the choices.
    """
    if batch_norm is not None and batch_norm not in get_args(BatchNorm):
        raise ValueError(
            f"Expected batch_norm to be None or one of {list(get_args(BatchNorm))}. "
            f"Received: batch_norm={batch_norm!r}."
        )
    return batch_norm


def checked_check(check: Check | None) -> Check:
    """Returns a strategy's argument `check`; if it is None, the environment variable's value."""
    said: Any = check
    name = "check"
    if said is None:
        said = os.environ.get(CHECK_VARIABLE) or "warn"
        name = CHECK_VARIABLE
    if said not in get_args(Check):
        raise ValueError(
            f"Expected {name} to be one of {list(get_args(Check))}. Received: {name}={said!r}. "
            "Leave it out for a warning."
        )
    return cast("Check", said)
