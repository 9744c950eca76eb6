"""Lose the machine in the middle of an epoch, and end with the same weights to the last bit.

Schedulers send SIGTERM before they take a machine away. With `kd.experimental.preempt` all workers
then finish their batch, back up, and end with exit code 76. The next start continues from that
batch. To show this in one run, the script sends the signal to itself, catches the exit, and does
what its next start would do. It compares the result with that of an uninterrupted run.

    KERAS_BACKEND=jax python examples/survive_preemption.py

A real script does not catch the exit: `kerasdist run --max-restarts 3 train.py`, or a scheduler,
starts the job again.
"""

import argparse
import os
import shutil
import signal
import tempfile
from pathlib import Path
from typing import Any

import keras
import numpy as np
from sklearn.datasets import load_diabetes

import kerasdist as kd

BATCH_SIZE = 32


def build_model() -> keras.Model:
    """Return a compiled regression with dropout, whose random draws must go on, too."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((10,)),
            keras.layers.Dense(32, activation="relu"),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(1),
        ]
    )
    model.compile(optimizer=keras.optimizers.Adam(1e-2), loss="mse")
    return model


class TakenAway(keras.callbacks.Callback):
    """Sends this process the signal that a scheduler sends."""

    def __init__(self, epoch: int, batch: int) -> None:
        super().__init__()
        self.when, self.epoch = (epoch, batch), 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        del logs
        self.epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        del logs
        if (self.epoch, batch) == self.when:
            print(f"SIGTERM after batch {batch + 1} of epoch {self.epoch + 1}")
            os.kill(os.getpid(), signal.SIGTERM)


def draw(path: str, untouched: list[float], first: list[float], second: list[float]) -> None:
    """Draw the losses of the run without interruption, and of both starts over them."""
    import matplotlib.pyplot as plt

    plt.figure(figsize=(6.4, 4), layout="constrained")
    plt.plot(untouched, color="lightgrey", linewidth=7, label="without interruption")
    plt.plot(first, label="until SIGTERM")
    plt.plot(range(len(first), len(first) + len(second)), second, label="started again")
    plt.axvline(len(first) - 0.5, color="red", linestyle="--")
    plt.xlabel("batch")
    plt.ylabel("loss of the epoch so far")
    plt.legend()
    plt.savefig(path)


def main() -> None:
    """Train with and without an interruption, and print how the weights differ."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--epochs", type=int, default=8)
    default = Path(tempfile.gettempdir()) / "kerasdist_backups"
    parser.add_argument("--backups", type=Path, default=default, help="a folder")
    parser.add_argument("--figure", help="a PNG file to write")
    options = parser.parse_args()

    if kd.cluster.detect() is None:  # not a worker of a job
        kd.config.set_logical_cpu_devices(2)  # used where there is no accelerator
    strategy = kd.auto()
    is_chief = strategy.extended.should_checkpoint
    if is_chief:
        shutil.rmtree(options.backups, ignore_errors=True)
    diabetes = load_diabetes()
    x = diabetes.data.astype("float32") * 20
    y = ((diabetes.target - 152.0) / 77.0).astype("float32")

    losses: list[list[float]] = []  # of each run, after each batch

    def train(*callbacks: keras.callbacks.Callback) -> keras.Model:
        noted: list[float] = []
        losses.append(noted)
        note = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda _, logs: noted.append(logs["loss"])
        )
        with strategy.scope():
            model = build_model()
        model.fit(
            *(x, y),
            batch_size=BATCH_SIZE,
            epochs=options.epochs,
            callbacks=[*callbacks, note],
            verbose=0,
        )
        return model

    def start() -> keras.Model:
        """What the script does each time it is started."""
        backup = kd.callbacks.BackupAndRestore(options.backups)
        kd.experimental.preempt(backup)
        # One worker gets the signal, and all leave.
        return train(backup, *([TakenAway(options.epochs // 2, 4)] if is_chief else []))

    untouched = train()
    try:
        start()
        raise RuntimeError("Expected the signal to end the first start")
    except SystemExit as leaving:
        print(f"fit has left with exit code {int(str(leaving))}; once more from the start")
    resumed = start()
    pairs = zip(untouched.get_weights(), resumed.get_weights(), strict=True)
    difference = max(float(np.max(np.abs(one - other))) for one, other in pairs)
    if options.figure:
        draw(options.figure, *losses)
    replicas = strategy.num_replicas_in_sync
    print(f"{replicas} replicas: difference to the run without interruption {difference}")


if __name__ == "__main__":
    main()
