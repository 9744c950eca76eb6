"""Converts devices to those of Keras and torch, and values to tensors on them."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import torch

from kerasdist import keras_compat
from kerasdist.devices import Device

# NumPy types that Keras and torch convert to the same types.
_KNOWN_TO_TORCH = frozenset(
    {np.bool_, np.uint8, np.int8, np.int16, np.int32, np.int64}
    | {np.float16, np.float32, np.float64}
)


def keras_name(device: Device) -> str:
    """Returns Keras's name of a device; all logical CPU devices are torch's one CPU."""
    # On the Mac's one GPU, Keras asks whether its device is "mps".
    return device.kind if device.kind in ("cpu", "mps") else str(device)


def torch_device(device: Device) -> torch.device:
    """Returns the ``torch.device`` of a device."""
    if device.kind == "cpu":
        return torch.device("cpu")
    return torch.device("cuda" if device.kind == "gpu" else device.kind, device.index)


def required_tensor(value: Any) -> torch.Tensor:
    """Converts the value that a replica contributes to a reduction to a tensor."""
    if isinstance(value, torch.Tensor):
        return value
    if value is None or isinstance(value, str | bytes):
        raise ValueError(
            f"Expected a tensor from every replica. Received: {value!r:.100}. Let the function "
            "return a number or a tensor."
        )
    return keras_compat.ops.convert_to_tensor(value)


def on_device(device: torch.device, leaf: Any) -> Any:
    """Returns an array or tensor as a tensor on a device, anything else unchanged."""
    if isinstance(leaf, np.ndarray | np.generic):
        if leaf.dtype.type in _KNOWN_TO_TORCH:  # Keras's conversion takes ten times as long
            return torch.as_tensor(leaf, device=device)
        with keras.device(str(device)):
            leaf = keras_compat.ops.convert_to_tensor(leaf)
    return leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf
