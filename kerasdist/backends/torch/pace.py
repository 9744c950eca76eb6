"""Whether replicas run at the same time, or take turns.

Turns are always right: the replicas go through the model one after another, in the order of ranks,
each with all of torch's threads. At the same time is wrong where replicas touch something that they
share: a layer that keeps a tensor on itself, as `keras.layers.LSTM(dropout=...)` keeps its mask, or
a draw from torch's own generator, which would then depend on timing. So replicas run at the same
time only in steps of Keras's own layers that are known to share nothing: on GPUs always then, on
one CPU, where each gets a part of the threads, if a step computes long enough for the threads not
to fight over Python's lock. Turns cost little on GPUs: what a replica launches there runs on while
the next one launches.
"""

from __future__ import annotations

import math
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, final

import torch

from kerasdist import keras_seam
from kerasdist.backends.torch import creation
from kerasdist.backends.torch.draws import StepDraws
from kerasdist.backends.torch.pieces import Part
from kerasdist.input.dividing import arrays

# Rows of a replica times the numbers that meet each of them (parameters, and the row itself) from
# which on replicas run at the same time. Below, they cost each other more than they save: with
# dense layers on 2 cores, 150,000 is 10 % slower than in turns and 6,000,000 is 20 % faster.
_ENOUGH_WORK = 1_000_000


# Of what the replicas get in a step and of their draws: whether they take turns in it.
TakeTurns = Callable[[Sequence[Part], StepDraws], AbstractContextManager[bool]]


@final
class Pace:
    """Decides for one model and one kind of step, by what is in it and never by the clock."""

    def __init__(self, model: Any, *, on_cpu: bool) -> None:
        """Starts with no decision.

        Args:
            model: A Keras model.
            on_cpu: Whether all replicas are on the CPU.
        """
        self._model = model
        self._on_cpu = on_cpu
        self._apart: bool | None = None  # whether replicas share nothing but what we keep apart
        self._parameters = 0

    @contextmanager
    def of_step(self, parts: Sequence[Part], draws: StepDraws) -> Iterator[bool]:
        """Says whether the replicas take turns in the step inside.

        The first step takes turns, and shows whether anything in it draws from torch's generator.

        Args:
            parts: The pieces of the batch.
            draws: The replicas' own draws, which do not count.

        Yields:
            Whether they take turns.
        """
        if self._apart is not None:
            pays = not self._on_cpu or _pays(parts, self._parameters)
            yield not (self._apart and pays)
            return
        before = torch.get_rng_state()
        yield True
        self._apart = _drew_nothing(before, draws) and _is_kerass_alone(self._model)
        self._parameters = self._model.count_params() if self._apart else 0


@final
@dataclass(frozen=True, eq=False)
class _Known:
    """What the first run of a function has shown.

    Attributes:
        apart: Whether the replicas share nothing but what we keep apart.
        parameters: How many numbers the layers hold that it calls.
        layers: These layers.
    """

    apart: bool
    parameters: int
    layers: weakref.WeakSet[Any]


@final
class LoopPace:
    """Decides for the functions of custom loops.

    A function's first run takes turns, and shows which layers it calls and whether it draws. If it
    makes variables (``if self.scale is None: self.scale = keras.Variable(1.0)``), the first replica
    makes them and the others find them.

    Replicas run at the same time if there are only Keras's own layers; on the CPU also only if that
    pays, and if a `kerasdist.function` calls: what such a step does to Python's objects happens at
    its own times on other backends, too. All other functions take turns.
    """

    def __init__(self, *, on_cpu: bool) -> None:
        """Starts with no function.

        Args:
            on_cpu: Whether all replicas are on the CPU.
        """
        self._on_cpu = on_cpu
        self._known: weakref.WeakKeyDictionary[Any, dict[Any, _Known]] = weakref.WeakKeyDictionary()

    @contextmanager
    def of_run(
        self,
        function: Callable[..., Any],
        in_step: bool,
        parts: Sequence[Part],
        draws: StepDraws,
    ) -> Iterator[bool]:
        """Says whether the replicas take turns in the run inside.

        Args:
            function: What they run.
            in_step: Whether a `kerasdist.function` calls.
            parts: What the replicas get.
            draws: Their own draws, which do not count.

        Yields:
            Whether they take turns.
        """
        # A method is another object each time it is asked for.
        owner = function.__self__ if isinstance(function, types.MethodType) else function
        name = function.__func__ if isinstance(function, types.MethodType) else None
        remembered = self._remembered(owner)
        known = remembered.get(name)
        with creation.layers_called() as layers:
            if known is not None:
                pays = not self._on_cpu or (in_step and _pays(parts, known.parameters))
                yield not (known.apart and pays)
                if not all(layer in known.layers for layer in layers):
                    del remembered[name]  # it is another model's step now
                return
            before = torch.get_rng_state()
            yield True
        variables = {id(one): one for layer in layers for one in layer.variables}.values()
        remembered[name] = _Known(
            apart=_drew_nothing(before, draws) and all(map(_is_apart, layers)),
            parameters=sum(math.prod(one.shape) for one in variables),
            layers=weakref.WeakSet(layers),
        )

    def _remembered(self, owner: Any) -> dict[Any, _Known]:
        try:
            return self._known.setdefault(owner, {})
        except TypeError:  # nothing that can be hashed, or referred to weakly: it stays unknown
            return {}


def _drew_nothing(before: torch.Tensor, draws: StepDraws) -> bool:
    """Whether torch's own generator is as it was, but for the seed of the replicas' own draws."""
    before = before if draws.left_behind is None else draws.left_behind
    return torch.equal(before, torch.get_rng_state())


def _pays(parts: Sequence[Part], parameters: int) -> bool:
    """Whether a replica computes long enough; its time has a lower bound in rows and parameters."""
    leaves = list(arrays(parts[0].argument))
    if not leaves:
        return False
    row = sum(math.prod(leaf.shape[1:]) for leaf in leaves)
    return max(leaf.shape[0] for leaf in leaves) * (parameters + row) >= _ENOUGH_WORK


def _is_apart(layer: Any) -> bool:
    """Whether no user code runs in a layer, and it keeps nothing from call to call."""
    return keras_seam.is_kerass_own(type(layer)) and not keras_seam.keeps_or_mixes_draws(layer)


def _is_kerass_alone(model: Any) -> bool:
    """Whether no user code runs in the model's steps, and no layer keeps a mask."""
    return keras_seam.is_kerass_own(type(model)) and all(
        map(_is_apart, keras_seam.flat_layers(model))
    )
