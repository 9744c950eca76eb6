"""Random draws that take no seed, in replicas.

`kerasdist.training.randomness` sees to draws from a ``keras.random.SeedGenerator``. Here is the
rest: Keras's global generator, and torch's own, from which unseeded ``keras.layers.Dropout`` draws
on PyTorch. On the CPU that is one for all replicas, so what a replica draws would depend on timing:
there each replica has a generator of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache
from typing import Any, final

import keras
import torch

from kerasdist import context, keras_seam
from kerasdist.backends.torch.collectives import TorchCollectives
from kerasdist.backends.torch.workers.collectives import WorkerCollectives


@final
class FirstDraw:
    """Stands for Keras's global seed generator until somebody draws from it.

    Keras makes it at the first unseeded draw of a thread, from Python's random numbers. Replicas
    must share the calling thread's, or each would draw from one of its own, in an order that
    depends on timing.
    """

    def __init__(self) -> None:
        """Makes the place holder."""
        self._lock = threading.Lock()
        self.generator: Any = None

    def next(self, ordered: bool = True) -> Any:
        """Returns the next seed, as ``keras.random.SeedGenerator`` does.

        Args:
            ordered: As Keras's.
        """
        with self._lock:
            if self.generator is None:
                with keras_seam.outside_stateless_scopes(), context.replica_scope(None):
                    self.generator = keras.random.SeedGenerator()
        return self.generator.next(ordered=ordered)


@final
class StepDraws:
    """The generators from which the replicas of a step draw on the CPU.

    Their seeds come from torch's own generator: one draw in each step in which a replica draws,
    whichever comes first, so ``keras.utils.set_random_seed`` decides about all of them.

    Attributes:
        left_behind: How the draw of this step left torch's generator, None if there was none.
    """

    def __init__(self, count: int) -> None:
        """Makes the generators.

        Args:
            count: How many replicas there are.
        """
        self.left_behind: torch.Tensor | None = None
        self._lock = threading.Lock()
        self._generators = [torch.Generator() for _ in range(count)]

    def begin(self) -> None:
        """Starts a step, in which nobody has drawn yet."""
        self.left_behind = None

    def generator(self, rank: int) -> torch.Generator:
        """Returns the generator of one replica.

        Args:
            rank: The replica's number.
        """
        with self._lock:
            if self.left_behind is None:
                seed = int(torch.randint(2**62, ()))
                for index, generator in enumerate(self._generators):
                    generator.manual_seed(seed + index)
                self.left_behind = torch.get_rng_state()
        return self._generators[rank]


@final
class RandomState:
    """The states of torch's own generators, on the CPU and on GPUs that are in use."""

    def __init__(self) -> None:
        """Remembers them."""
        self._cpu = torch.get_rng_state()
        self._gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []

    def restore(self) -> None:
        """Puts them back."""
        torch.set_rng_state(self._cpu)
        if self._gpus:
            torch.cuda.set_rng_state_all(self._gpus)


@cache
def install() -> None:
    """Puts the hook into Keras's dropout, once in a process."""
    keras_seam.install_dropout(_dropout)


def _dropout(
    original: Callable[..., Any],
    inputs: Any,
    rate: float,
    noise_shape: Any = None,
    seed: Any = None,
) -> Any:
    collectives = getattr(context.replica(), "collectives", None)
    if (
        not isinstance(collectives, TorchCollectives | WorkerCollectives)
        or inputs.device.type != "cpu"
        or keras_seam.is_seeded(seed)
        or noise_shape is not None
        or not 0.0 < rate < 1.0
    ):
        return original(inputs, rate, noise_shape=noise_shape, seed=seed)
    generator = collectives.draws.generator(collectives.rank)
    return inputs * _kept(inputs, 1.0 - rate, generator).div_(1.0 - rate)


def _kept(like: torch.Tensor, share: float, generator: torch.Generator) -> torch.Tensor:
    """A tensor of ones for this share of its elements, and zeros.

    As ``bernoulli_`` draws them, in less than half the time: 32 bits for each element, two of them
    at once, where that takes 64.
    """
    pairs = torch.empty((like.numel() + 1) // 2, dtype=torch.int64)
    pairs.random_(-(2**63), None, generator=generator)
    numbers = pairs.view(torch.int32)[: like.numel()].view(like.shape)
    bound = min(round(share * 2**32), 2**32 - 1) - 2**31
    kept = torch.empty_like(like, requires_grad=False)
    torch.lt(numbers, bound, out=kept)
    return kept


def part_from_first_gpu(rank: int, device: torch.device) -> None:
    """Lets torch's own draws differ by replica on GPUs.

    ``torch.manual_seed`` gives every GPU the same seed, so all replicas would drop the same units.

    Args:
        rank: The replica's number.
        device: Its device.
    """
    if device.type != "cuda" or rank == 0:
        return
    generators = torch.cuda.default_generators
    seed = generators[0].initial_seed()
    if generators[device.index].initial_seed() == seed:
        generators[device.index].manual_seed(seed + rank)
