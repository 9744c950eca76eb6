"""The random state of PyTorch that a resumed training run needs, on every backend of Keras.

On every backend a ``DataLoader`` draws the order of its data from PyTorch's generators.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

GENERATOR = torch.default_generator
"""Torch's generator on the host, from which samplers draw."""


def seed(number: int) -> None:
    """Seeds torch's generators on all devices."""
    torch.manual_seed(number)


def gpu_random_states() -> list[str]:
    """Returns the states of the generators of this process's GPUs; [] before a GPU is used."""
    if not torch.cuda.is_initialized():
        return []
    return [state.numpy().tobytes().hex() for state in torch.cuda.get_rng_state_all()]


def set_gpu_random_states(states: list[str]) -> None:
    """Restores the states of the generators of this process's GPUs."""
    if states:
        torch.cuda.set_rng_state_all([_tensor(state) for state in states])


def kept(value: object) -> str | np.ndarray[Any, Any] | None:
    """Returns the data to save for a torch generator or dense tensor, None for other values."""
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes().hex()
    if isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_meta:
        return value.detach().cpu().numpy()
    return None


def put_back(kept_value: str | np.ndarray[Any, Any], current: Any) -> Any:
    """Returns a generator or a tensor, restored from the result of `kept`."""
    if isinstance(kept_value, str):
        current.set_state(_tensor(kept_value))
        return current
    return torch.from_numpy(np.array(kept_value))


def _tensor(state: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(state), dtype=torch.uint8)
