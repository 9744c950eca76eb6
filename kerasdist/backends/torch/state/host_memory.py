"""Keeps an optimizer's variables in the host's memory between updates (`offload="optimizer"`).

The memory is page-locked, so that a GPU can copy from it and to it without the CPU. Weights are
updated in groups. The update of a group copies the optimizer's variables for the group's weights to
the device, lets Keras update them on the device, and copies them back to the host. So the device
holds the optimizer's variables of one group at a time.
"""

from __future__ import annotations

import weakref
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import Any

import keras
import torch

from kerasdist import keras_compat
from kerasdist.core.ownership import VariableTable
from kerasdist.core.user_warnings import warn_once

held: weakref.WeakKeyDictionary[keras.Optimizer, VariableTable[list[keras.Variable]]] = (
    weakref.WeakKeyDictionary()
)
"""For each optimizer, by weight: the variables for the weight that are in the host's memory."""

_on_host: VariableTable[bool] = VariableTable()

# Variables whose names end with these words stay on the device, because Keras changes them outside
# of a group's update.
_ON_DEVICE = ("gradient_accumulator", "average")


@torch.no_grad()
def move(optimizer: keras.Optimizer, weight: keras.Variable, slot: keras.Variable) -> None:
    """Moves a new optimizer variable to the host, if its optimizer can update weights in groups."""
    stored = keras_compat.stored_value(slot)
    if stored is None or stored.is_meta or slot.name.endswith(_ON_DEVICE):
        return
    if not keras_compat.updates_at_once(optimizer):
        warn_once(
            optimizer,
            f"The device holds the variables of the optimizer {optimizer.name!r}, in spite of "
            "offload='optimizer': on PyTorch only optimizers of Keras that update many weights at "
            "once, such as SGD, Adam and AdamW, keep variables on the host. Received: "
            f"{type(optimizer).__name__}.",
        )
        return
    own = torch.empty_like(stored, device="cpu", pin_memory=stored.is_cuda)
    keras_compat.store_value(slot, torch.nn.Parameter(own.copy_(stored), requires_grad=False))
    table = held.setdefault(optimizer, VariableTable())
    table.put(weight, [*(table.get(weight) or ()), slot])
    _on_host.put(slot, True)


def is_on_host(variable: keras.Variable) -> bool:
    """Returns whether a variable is in the host's memory between updates."""
    return _on_host.get(variable) is not None


@contextmanager
def on_device(
    optimizer: keras.Optimizer, weights: Iterable[keras.Variable], device: torch.device
) -> Generator[None]:
    """Keeps an optimizer's variables for some weights on a device while the weights are updated."""
    table = held[optimizer]
    slots = [slot for weight in weights for slot in table.get(weight) or ()]
    before = keras_compat.stored_values(slots)
    for slot, own in zip(slots, before, strict=True):
        there: Any = own.detach().to(device, non_blocking=True, copy=True)
        keras_compat.store_value(slot, torch.nn.Parameter(there, requires_grad=False))
    try:
        yield
    finally:
        with torch.no_grad():
            for slot, own in zip(slots, before, strict=True):
                own.copy_(keras_compat.stored_value(slot), non_blocking=True)
                keras_compat.store_value(slot, own)


def wait(device: torch.device) -> None:
    """Waits until a GPU's copies to the host are done, so that the host may read the values."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
