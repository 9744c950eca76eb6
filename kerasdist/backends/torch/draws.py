"""Random draws that take no seed, in replicas.

`kerasdist.training.randomness` sees to draws from a ``keras.random.SeedGenerator``. Here is the
rest: Keras's global generator, and torch's own, from which unseeded ``keras.layers.Dropout`` draws
on PyTorch.
"""

from __future__ import annotations

import threading
from typing import Any, final

import keras
import torch

from kerasdist import context, keras_seam


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


def part_from_first_gpu(rank: int, device: torch.device) -> None:
    """Lets torch's own draws differ by replica on GPUs.

    On the CPU all replicas draw from one generator, in turns. ``torch.manual_seed`` gives every
    GPU the same seed, so all replicas would drop the same units.

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
