"""What a run of the soak trains on, by which optimizer, beside which callbacks: chosen by chance.

The seed of the soak decides, so that a run can be had again; each time the script is started it
makes all of it again.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np

BATCH = 16


def arrays(x, y, seed: int) -> dict[str, Any]:
    return {"x": x, "y": y, "batch_size": BATCH}


def shuffled_pipeline(x, y, seed: int) -> dict[str, Any]:
    import tensorflow as tf

    tf.random.set_seed(seed)
    rows = tf.data.Dataset.from_tensor_slices((x, y))
    return {"x": rows.shuffle(64).batch(BATCH).prefetch(2)}


def repeated_pipeline(x, y, seed: int) -> dict[str, Any]:
    import tensorflow as tf

    tf.random.set_seed(seed)
    rows = tf.data.Dataset.from_tensor_slices((x, y))
    return {"x": rows.shuffle(64).repeat().batch(BATCH).prefetch(2), "steps_per_epoch": 17}


def loader(x, y, seed: int) -> dict[str, Any]:
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    torch.manual_seed(seed)
    rows = TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
    return {"x": DataLoader(rows, batch_size=BATCH, shuffle=True)}


class Shuffling(keras.utils.PyDataset):
    """Draws the order of its rows as an epoch ends, and noise for each batch."""

    def __init__(self, x, y, seed: int) -> None:
        super().__init__()
        self.rows, self.targets, self.order = x, y, np.arange(len(x))
        self.generator = np.random.default_rng(seed)

    def __len__(self) -> int:
        return len(self.rows) // BATCH

    def __getitem__(self, index: int):
        chosen = self.order[index * BATCH : (index + 1) * BATCH]
        noise = self.generator.normal(size=(BATCH, self.rows.shape[1])).astype("float32")
        return self.rows[chosen] + 0.1 * noise, self.targets[chosen]

    def on_epoch_end(self) -> None:
        self.generator.shuffle(self.order)


def dataset(x, y, seed: int) -> dict[str, Any]:
    return {"x": Shuffling(x, y, seed), "shuffle": False}


def generator(x, y, seed: int) -> dict[str, Any]:
    def batches():
        draws = np.random.default_rng(seed)
        while True:
            chosen = draws.integers(len(x), size=BATCH)
            yield x[chosen], y[chosen]

    return {"x": batches(), "steps_per_epoch": 17}


DATA: tuple[Callable[..., dict[str, Any]], ...] = (
    arrays,
    shuffled_pipeline,
    repeated_pipeline,
    loader,
    dataset,
    generator,
)

OPTIMIZERS = (
    {"learning_rate": 1e-3},
    {"learning_rate": 1e-3, "use_ema": True},
    {"learning_rate": 1e-3, "gradient_accumulation_steps": 3},
)


class OwnRate(keras.callbacks.Callback):
    """Changes the rate as an epoch begins, by draws of its own."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.generator = np.random.default_rng(seed)

    def on_epoch_begin(self, epoch, logs=None) -> None:
        rate = float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate))
        self.model.optimizer.learning_rate = rate * self.generator.uniform(0.9, 1.1)


def _scaled(epoch, rate):
    return rate * 0.99


def callbacks(folder: Path, seed: int) -> list[Any]:
    """Returns some callbacks of those that a restart must bring back."""
    known = [
        lambda: keras.callbacks.LearningRateScheduler(_scaled),
        lambda: OwnRate(seed),
        lambda: keras.callbacks.ReduceLROnPlateau(
            factor=0.7, patience=1, min_delta=0.01, cooldown=2
        ),
        lambda: keras.callbacks.EarlyStopping(
            "val_accuracy", mode="max", patience=1000, restore_best_weights=True
        ),
        lambda: keras.callbacks.CSVLogger(folder / "lines.csv", append=True),
        lambda: keras.callbacks.ModelCheckpoint(
            folder / "best.weights.h5", save_best_only=True, save_weights_only=True
        ),
    ]
    return [make() for make in random.Random(f"callbacks {seed}").sample(known, 4)]


def optimizer(seed: int) -> Any:
    return keras.optimizers.Adam(**random.Random(f"optimizer {seed}").choice(OPTIMIZERS))


def data(x, y, seed: int) -> dict[str, Any]:
    return random.Random(f"data {seed}").choice(DATA)(x, y, seed)


def described(seed: int) -> str:
    """Returns what a seed has chosen, in words."""
    source = random.Random(f"data {seed}").choice(DATA).__name__
    own = random.Random(f"optimizer {seed}").choice(OPTIMIZERS)
    names = [type(one).__name__ for one in callbacks(Path(), seed)]
    return f"{source}; Adam {own}; {', '.join(names)}"
