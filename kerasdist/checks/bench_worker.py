"""The model that ``kerasdist bench`` trains where it is given no script."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from kerasdist.strategies.auto import auto

EPOCHS, STEPS, BATCH_PER_REPLICA = 3, 20, 256
_CPU, _ACCELERATOR = (512, 4), (4096, 8)


def main() -> None:
    """Trains; `kerasdist.callbacks.telemetry.Bench` measures."""
    strategy = auto()
    is_cpu = strategy.extended.worker_devices[0].startswith("cpu")
    width, depth = _CPU if is_cpu else _ACCELERATOR
    with strategy.scope():
        model = _model(width, depth)
    batch = BATCH_PER_REPLICA * strategy.num_replicas_in_sync
    x = np.random.default_rng(0).normal(size=(batch * STEPS, width)).astype("float32")
    model.fit(x, x[:, :1], batch_size=batch, epochs=EPOCHS, shuffle=False, verbose=0)


def _model(width: int, depth: int) -> Any:
    """Returns a network of dense layers."""
    hidden = [keras.layers.Dense(width, activation="relu") for _ in range(depth)]
    model = keras.Sequential([keras.Input((width,)), *hidden, keras.layers.Dense(1)])
    model.compile(optimizer="adam", loss="mse")
    return model


if __name__ == "__main__":
    main()
