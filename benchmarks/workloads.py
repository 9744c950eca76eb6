"""What the benchmarks train: a tiny model, which is all overhead, and one that computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Workload:
    """A model and its data: layer widths (input first), batch size, steps in a round or epoch."""

    widths: tuple[int, ...]
    batch: int
    steps: int


WORKLOADS = {
    "tiny": Workload(widths=(8, 1), batch=4, steps=400),
    "medium": Workload(widths=(784, 512, 512, 10), batch=256, steps=30),
}


def dense_model(workload: Workload) -> Any:
    """Returns dense layers of the workload's widths."""
    import keras

    keras.utils.set_random_seed(0)
    *hidden, last = workload.widths[1:]
    return keras.Sequential(
        [
            keras.Input((workload.widths[0],)),
            *(keras.layers.Dense(width, activation="relu") for width in hidden),
            keras.layers.Dense(last),
        ]
    )
