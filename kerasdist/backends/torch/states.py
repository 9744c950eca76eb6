"""What of PyTorch's a training run must find again, whichever backend Keras runs on.

A ``DataLoader`` draws its order from PyTorch's generators on every backend.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def random_state() -> str:
    """Returns the state of torch's generator on the host, from which samplers draw, as text."""
    return torch.get_rng_state().numpy().tobytes().hex()


def set_random_state(state: str) -> None:
    """Lets torch's generator on the host go on from a state.

    Args:
        state: What `random_state` returned.
    """
    torch.set_rng_state(_tensor(state))


def gpu_random_states() -> list[str]:
    """Returns the states of the generators of this process's GPUs; none before their first use."""
    if not torch.cuda.is_initialized():
        return []
    return [state.numpy().tobytes().hex() for state in torch.cuda.get_rng_state_all()]


def set_gpu_random_states(states: list[str]) -> None:
    """Lets those generators go on from their states.

    Args:
        states: What `gpu_random_states` returned, on as many GPUs.
    """
    if states:
        torch.cuda.set_rng_state_all([_tensor(state) for state in states])


def kept(value: Any) -> str | np.ndarray[Any, Any] | None:
    """Returns what to keep of a generator or a tensor of PyTorch's, None for anything else.

    Args:
        value: Anything.
    """
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes().hex()
    if isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_meta:
        return value.detach().cpu().numpy()
    return None


def put_back(kept_value: str | np.ndarray[Any, Any], current: Any) -> Any:
    """Returns a generator or a tensor as it was.

    Args:
        kept_value: What `kept` returned.
        current: What stands there now; a generator must.
    """
    if isinstance(kept_value, str):
        current.set_state(_tensor(kept_value))
        return current
    return torch.from_numpy(np.array(kept_value))


def _tensor(state: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(state), dtype=torch.uint8)
