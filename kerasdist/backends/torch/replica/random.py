"""Handles random draws in replicas if the user passes no seed.

`kerasdist.training.randomness` handles draws from a ``keras.random.SeedGenerator``. This file
handles draws from Keras's global seed generator. It also handles draws from torch's own generator,
from which ``keras.layers.Dropout`` without a seed draws on PyTorch. On the CPU each replica gets a
torch generator of its own, so that a replica draws the same numbers whether it is a thread or a
worker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import TYPE_CHECKING, Any, final

import keras
import torch

from kerasdist import config, keras_compat
from kerasdist.backends.torch.fit import graph_ops
from kerasdist.backends.torch.replica.collectives import collectives_here
from kerasdist.backends.torch.replica.placing import default_generators
from kerasdist.backends.torch.workers.process_group import Group
from kerasdist.core.context import current, replica_scope

if TYPE_CHECKING:
    from kerasdist.backends.torch.state.gathered import ShardedWeights


@final
class FirstDraw:
    """Stands in for Keras's global seed generator until a replica first draws from it.

    Keras makes a generator in each thread at the thread's first draw without a seed. With this
    object the replicas' threads share the generator of the thread that runs the step.
    """

    def __init__(self, weights: ShardedWeights | None) -> None:
        self.generator: Any = None
        self._weights = weights

    def next(self, ordered: bool = True) -> Any:
        """Returns the next seed, as ``keras.random.SeedGenerator`` does."""
        if self.generator is None:
            with keras_compat.outside_stateless_scopes(), replica_scope(None):
                self.generator = keras.random.SeedGenerator()
                if self._weights is not None:
                    [state] = keras_compat.stored_values([self.generator.state])
                    [equal] = self._weights.equalize([state])
                    state.copy_(equal)
        return self.generator.next(ordered=ordered)


@final
class StepDraws:
    """The generators from which this process's replicas draw in a step on the CPU.

    The first replica that draws in a step seeds the generators of all replicas, by one draw from
    torch's own generator. So ``keras.utils.set_random_seed`` determines the draws of all replicas.
    If each replica draws the numbers of the global batch (`kerasdist.config.set_draws`), the
    generators of all replicas start from the state of torch's own generator instead. In that case,
    torch's own generator gets the state of a replica's generator after the step.
    """

    def __init__(self, ranks: range) -> None:
        self._first: dict[int, torch.Tensor] | None = None
        self._generators = {rank: torch.Generator() for rank in ranks}

    def begin(self) -> None:
        """Starts a step of the replicas, before any of them draws."""
        self._first = None

    def end(self) -> None:
        """Ends a step.

        If `kerasdist.config.draws` is "global", torch's own generator gets the state of a replica's
        generator.
        """
        if self._first is not None and config.draws() == "global":
            torch.default_generator.set_state(next(iter(self._generators.values())).get_state())

    def generator(self, rank: int) -> torch.Generator:
        """Returns the generator of one replica; the first call in a step seeds all generators."""
        if self._first is None:
            seed = None if config.draws() == "global" else int(torch.randint(2**62, ()))
            for one, generator in self._generators.items():
                if seed is None:
                    generator.set_state(torch.default_generator.get_state())
                else:
                    generator.manual_seed(seed + one)
            self._first = {one: each.get_state() for one, each in self._generators.items()}
        return self._generators[rank]

    def state(self, rank: int) -> torch.Tensor | None:
        """Returns the state of a replica's generator; None before the first draw of the step."""
        return None if self._first is None else self._generators[rank].get_state()

    @contextmanager
    def again(self, rank: int, state: torch.Tensor | None) -> Iterator[None]:
        """Lets a block repeat a replica's draws, beginning at the `state` of its generator.

        If `state` is None, the draws begin at the generator's state at the start of the step.
        """
        if self._first is None:  # nothing was drawn in this step
            yield
            return
        generator = self._generators[rank]
        now = generator.get_state()
        generator.set_state(self._first[rank] if state is None else state)
        try:
            yield
        finally:
            generator.set_state(now)


@cache
def install() -> None:
    """Installs the hook into Keras's dropout, once per process."""
    keras_compat.install(dropout=_dropout)


def _dropout(original: Callable[..., Any], *args: Any, **kwargs: Any) -> object:
    draw = partial(_dropped, original) if original.__name__ == "dropout" else original
    return draw(*args, **kwargs)


def _dropped(
    original: Callable[..., Any],
    inputs: torch.Tensor,
    rate: float,
    noise_shape: object = None,
    seed: object = None,
) -> Any:
    collectives = collectives_here()
    if (
        collectives is None
        or inputs.device.type != "cpu"
        or current.trial is not None
        or keras_compat.is_seeded(seed)
        or noise_shape is not None
        or not 0.0 < rate < 1.0
    ):
        return original(inputs, rate, noise_shape=noise_shape, seed=seed)
    if torch.compiler.is_compiling():
        return inputs * (_kept_in_graph(inputs, 1.0 - rate, collectives.number) / (1.0 - rate))
    generator = collectives.draws.generator(collectives.rank)
    # A DTensor cannot be filled from a given generator, so the mask is a plain tensor.
    like = torch.empty(inputs.shape, dtype=inputs.dtype) if collectives.scope.weights else inputs
    return inputs * _kept(like, 1.0 - rate, generator).div_(1.0 - rate)


@torch.library.custom_op(  # an operator, because torch's compiler does not support generators
    "kerasdist::kept",
    mutates_args=(),
    schema="(Tensor like, float share, int replica) -> Tensor",
    tags=(torch.Tag.nondeterministic_seeded,),
)
def _kept_in_graph(like: torch.Tensor, share: float, replica: int) -> torch.Tensor:
    own = graph_ops.replica_of(replica)
    return _kept(like, share, own.draws.generator(own.rank))


_kept_in_graph.register_fake(lambda like, *_: torch.empty_like(like))
# A mask has no gradient.
_kept_in_graph.register_autograd(lambda *_: (None, None, None))


def _kept(like: torch.Tensor, share: float, generator: torch.Generator) -> torch.Tensor:
    """Returns a random tensor whose elements are 1 with probability `share`, else 0."""
    return torch.empty_like(like, requires_grad=False).bernoulli_(share, generator=generator)


def part_from_other_gpus(rank: int, device: torch.device) -> None:
    """Makes a replica's draws from its GPU's own generator differ from the other replicas' draws.

    ``torch.manual_seed`` gives every GPU the same seed, so all replicas would drop the same units.
    """
    if rank == 0 or config.draws() == "global":
        return
    generator, first = (torch.cuda.default_generators[index] for index in (device.index, 0))
    seed = generator.initial_seed()
    if seed == torch.initial_seed() or (device.index and seed == first.initial_seed()):
        generator.manual_seed(seed + rank)


@contextmanager
def chiefs_draws(group: Group, device: torch.device) -> Iterator[None]:
    """In a block, makes torch's generators on all workers draw the same numbers as on the chief.

    All workers must enter the context. Afterwards a generator whose state had differed from the
    chief's gets its own state back.
    """
    generators = default_generators(device)
    own = [generator.get_state() for generator in generators]
    chiefs = group.from_chief(own)
    each = zip(generators, own, chiefs, strict=True)
    differing = [(one, before, chief) for one, before, chief in each if not before.equal(chief)]
    for generator, _, chief in differing:
        generator.set_state(chief)
    try:
        yield
    finally:
        for generator, before, _ in differing:
            generator.set_state(before)
