"""Whether the replicas on one CPU run at the same time, or take turns.

Turns are always right: the replicas go through the model one after another, in the order of ranks,
each with all of torch's threads. At the same time, with a part of the threads each, is faster where
a step computes long enough for the threads not to fight over Python's lock. It is wrong where
replicas touch something that they share: a layer that keeps a tensor on itself, or a draw from
torch's own generator, which would then depend on timing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, final

import torch

from kerasdist import keras_seam
from kerasdist.backends.torch.draws import StepDraws
from kerasdist.backends.torch.pieces import Division, arrays

# Rows of a replica times the numbers that meet each of them (parameters, and the row itself) from
# which on replicas run at the same time. Below, they cost each other more than they save: with
# dense layers on 2 cores, 150,000 is 10 % slower than in turns and 6,000,000 is 20 % faster.
_ENOUGH_WORK = 1_000_000


@final
class Pace:
    """Decides for one model and one kind of step, by what is in it and never by the clock."""

    def __init__(self, model: Any) -> None:
        """Starts with no decision.

        Args:
            model: A Keras model.
        """
        self._model = model
        self._apart: bool | None = None  # whether replicas share nothing but what we keep apart
        self._parameters = 0

    @contextmanager
    def of_step(self, division: Division, draws: StepDraws) -> Iterator[bool]:
        """Says whether the replicas take turns in the step inside.

        The first step takes turns, and shows whether anything in it draws from torch's generator.

        Args:
            division: The pieces of the batch.
            draws: The replicas' own draws, which do not count.

        Yields:
            Whether they take turns.
        """
        if self._apart is not None:
            yield not self._apart or self._work(division) < _ENOUGH_WORK
            return
        before = torch.get_rng_state()
        yield True
        before = before if draws.left_behind is None else draws.left_behind
        untouched = torch.equal(before, torch.get_rng_state())
        self._apart = untouched and _is_kerass_alone(self._model)
        self._parameters = self._model.count_params() if self._apart else 0

    def _work(self, division: Division) -> int:
        """A lower bound of what a replica computes; a convolution computes more."""
        row = sum(math.prod(leaf.shape[1:]) for leaf in arrays(division.pieces[0]))
        return division.sizes[0] * (self._parameters + row)


def _is_kerass_alone(model: Any) -> bool:
    """Whether no code of the user's runs in the model's steps, and no layer keeps a mask."""
    if not keras_seam.is_kerass_own(type(model)):
        return False
    return all(
        keras_seam.is_kerass_own(type(layer)) and not keras_seam.keeps_or_mixes_draws(layer)
        for layer in keras_seam.flat_layers(model)
    )
