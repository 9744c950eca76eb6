"""Converts a `Device` to the device of Keras or torch, and moves values to it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, final

import keras
import numpy as np
import torch

from kerasdist import keras_compat
from kerasdist.backends.torch import internals
from kerasdist.core.devices import Device


@final
class Version:
    """Records a tensor as it is now, to find out later whether it was changed or replaced."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor, self._address = tensor, tensor.data_ptr()
        self._changes = internals.COUNT_OF_CHANGES.of(tensor)

    def is_of(self, tensor: torch.Tensor) -> bool:
        """Returns whether `tensor` is the recorded tensor, unchanged since it was recorded."""
        is_there = tensor is self._tensor and tensor.data_ptr() == self._address
        return is_there and internals.COUNT_OF_CHANGES.of(tensor) == self._changes


def torch_device(device: Device) -> torch.device:
    """Returns the ``torch.device`` of a `Device`."""
    if device.kind == "cpu":
        return torch.device("cpu")
    return torch.device("cuda" if device.kind == "gpu" else device.kind, device.index)


def computing_on(device: Device) -> AbstractContextManager[object]:
    """Returns a context in which Keras, and for a GPU also CUDA, makes tensors on a device."""
    if device.kind == "gpu":
        return _computing_on_gpu(device)
    # All logical CPU devices are torch's one CPU. Keras calls the only GPU of a Mac "mps".
    return keras.device(device.kind if device.kind in ("cpu", "mps") else str(device))


def default_generators(device: torch.device) -> list[torch.Generator]:
    """Returns torch's default generators for a device: the host's and, for a GPU, the GPU's."""
    if device.type != "cuda":
        return [torch.default_generator]
    index = torch.cuda.current_device() if device.index is None else device.index
    return [torch.default_generator, torch.cuda.default_generators[index]]


@contextmanager
def _computing_on_gpu(device: Device) -> Iterator[None]:
    # CUDA lacks some operations. Keras replaces them if the device is named "cuda", but not if it
    # is named "cuda:0".
    with keras.device("cuda"), torch.cuda.device(device.index):
        yield


def move(device: torch.device, leaf: object) -> Any:
    """Moves a tensor to a device; returns any other object unchanged.

    Does not wait until a copy to a GPU is done.
    """
    if not isinstance(leaf, torch.Tensor) or leaf.device == device:
        return leaf
    if device.type == "cpu":
        return leaf.to(device)
    if device.type == "cuda" and leaf.device.type == "cpu":
        # A copy from ordinary memory would first wait for all work of the GPU. The page-locked
        # tensor may be freed during the copy, because torch reuses its memory only after the copy.
        leaf = leaf.pin_memory()
    return leaf.to(device, non_blocking=True)


def move_together(device: torch.device, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns tensors on a device; tensors of the same type and device are moved in one copy."""
    found = list(tensors)
    packs: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for index, tensor in enumerate(tensors):
        if tensor.device != device:
            if tensor.layout is torch.strided:
                packs.setdefault((tensor.dtype, tensor.device), []).append(index)
            else:
                found[index] = move(device, tensor)
    for members in packs.values():
        flat = move(device, torch.cat([tensors[index].reshape(-1) for index in members]))
        chunks = flat.split([tensors[index].numel() for index in members])
        for index, chunk in zip(members, chunks, strict=True):
            found[index] = chunk.view(tensors[index].shape)
    return found


def add_up(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns the sum of tensors of one shape, on the device of the first tensor."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part.to(total.device)
    return total


def required_tensor(value: object) -> torch.Tensor:
    """Returns, as a tensor, the value that a replica contributes to a reduction."""
    if isinstance(value, torch.Tensor):
        return value
    if value is None or isinstance(value, str | bytes):
        raise ValueError(
            f"Expected a tensor from every replica. Received: {value!r:.100}. Let the function "
            "return a number or a tensor."
        )
    return keras_compat.ops.convert_to_tensor(value)


def on_device(device: torch.device, leaf: object) -> Any:
    """Returns an array or tensor as a tensor on a device, anything else unchanged."""
    if isinstance(leaf, np.ndarray | np.generic):
        with keras.device("cpu"):
            leaf = keras_compat.ops.convert_to_tensor(leaf)
    return move(device, leaf)
