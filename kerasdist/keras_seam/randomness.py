"""Keras's random draws."""

from __future__ import annotations

from typing import Any

from keras.src.backend.common import global_state
from keras.src.layers.rnn.dropout_rnn_cell import DropoutRNNCell
from keras.src.random.seed_generator import SeedGenerator
from keras.src.utils.rng_utils import GLOBAL_RANDOM_SEED

_GLOBAL_SEED_GENERATOR = "global_seed_generator"


# Where the layers stand that drop units or add noise, by draws of their replica's own.
_NOISE = "keras.src.layers.regularization."


def is_seeded(seed: Any) -> bool:
    """Returns whether the user chose the seed of a draw; if not, torch's own generator decides.

    Args:
        seed: None, an int, or a ``keras.random.SeedGenerator``.
    """
    return seed is not None and not (isinstance(seed, SeedGenerator) and seed._initial_seed is None)


def keeps_or_mixes_draws(layer: Any) -> bool:
    """Returns whether two threads that run a layer on PyTorch could disturb each other's draws.

    A recurrent cell keeps its dropout masks on itself; draws from a few distributions (beta, gamma,
    binomial, as layers for images make them) set torch's own generator for a moment.

    Args:
        layer: One of Keras's layers.
    """
    if isinstance(layer, DropoutRNNCell):
        cell: Any = layer  # the class says in words what its heirs have
        return bool(cell.dropout or cell.recurrent_dropout)
    return bool(layer._seed_generators) and not type(layer).__module__.startswith(_NOISE)


def global_seed_generator() -> Any:
    """Returns the generator that unseeded draws of this thread take their seeds from, or None."""
    return global_state.get_global_attribute(_GLOBAL_SEED_GENERATOR)


def set_global_seed_generator(generator: Any) -> None:
    """Sets the generator that unseeded draws of this thread take their seeds from.

    Args:
        generator: An object with the method ``next`` of ``keras.random.SeedGenerator``, or None.
    """
    global_state.set_global_attribute(_GLOBAL_SEED_GENERATOR, generator)


def global_seed() -> int | None:
    """Returns what ``keras.utils.set_random_seed`` was called with last, None if it was not."""
    return global_state.get_global_attribute(GLOBAL_RANDOM_SEED)
