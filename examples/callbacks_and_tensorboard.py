"""Keras's callbacks in a job: who decides, and who writes.

TensorBoard and CSVLogger write files, so they act on the chief alone. ModelCheckpoint decides on
every worker and writes on the chief; EarlyStopping decides on every worker, from the same numbers.
If a callback of your own writes, wrap it in `kd.callbacks.ChiefOnly`. Then a job with several
workers writes the same files that a single process writes:

    KERAS_BACKEND=jax python examples/callbacks_and_tensorboard.py --folder runs
    tensorboard --logdir runs
"""

import argparse
import json
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import keras
from sklearn.datasets import load_digits

import kerasdist as kd


class SecondsAnEpoch(keras.callbacks.Callback):
    """Writes to a file of JSON lines what each epoch has taken."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.start = 0.0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        del epoch, logs
        self.start = time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        del logs
        line = {"epoch": epoch, "seconds": round(time.perf_counter() - self.start, 3)}
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def draw(path: str, losses: dict[str, list[float]]) -> None:
    """Draw the losses, and the epoch whose weights EarlyStopping has restored."""
    import matplotlib.pyplot as plt

    plt.figure(figsize=(6.4, 4), layout="constrained")
    for name in ("loss", "val_loss"):
        plt.plot(range(1, len(losses[name]) + 1), losses[name], marker="o", label=name)
    best = min(range(len(losses["val_loss"])), key=losses["val_loss"].__getitem__) + 1
    plt.axvline(best, color="grey", linestyle="--", label=f"best weights: epoch {best}")
    plt.xlabel("epoch")
    plt.yscale("log")
    plt.legend()
    plt.savefig(path)


def main() -> None:
    """Train with five callbacks, and print which files there are."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--epochs", type=int, default=30)
    default = Path(tempfile.gettempdir()) / "kerasdist_callbacks"
    parser.add_argument("--folder", type=Path, default=default)
    parser.add_argument("--figure", help="a PNG file to write")
    options = parser.parse_args()
    folder = options.folder

    if kd.cluster.detect() is None:  # not a worker of a job
        kd.config.set_logical_cpu_devices(2)  # used where there is no accelerator
    strategy = kd.auto()
    if strategy.extended.should_checkpoint:  # the chief, or the only process
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    keras.utils.set_random_seed(0)
    digits = load_digits()
    x, y = (digits.data / 16.0).astype("float32"), digits.target.astype("int32")
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((64,)), keras.layers.Dense(64, activation="relu"), keras.layers.Dense(10)]
        )
        model.compile(
            optimizer=keras.optimizers.Adam(1e-2),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    history = model.fit(
        *(x[:1200], y[:1200]),
        batch_size=64,
        epochs=options.epochs,
        validation_data=(x[1200:1500], y[1200:1500]),
        callbacks=[
            keras.callbacks.EarlyStopping(patience=3, restore_best_weights=True),
            keras.callbacks.ModelCheckpoint(folder / "best.keras", save_best_only=True),
            keras.callbacks.CSVLogger(folder / "epochs.csv"),
            keras.callbacks.TensorBoard(folder / "tensorboard"),
            kd.callbacks.ChiefOnly(SecondsAnEpoch(folder / "seconds.jsonl")),
        ],
        verbose=0,
    )
    _, accuracy = model.evaluate(x[1500:], y[1500:], batch_size=64, verbose=0)
    if options.figure:
        draw(options.figure, history.history)
    if strategy.extended.should_checkpoint:
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                print(f"  {path.relative_to(folder).parts[0]}: {path.stat().st_size} bytes")
    # All workers have stopped in the same epoch, and have read the same best weights.
    print(
        f"{strategy.num_replicas_in_sync} replicas: stopped after {len(history.epoch)} epochs, "
        f"test accuracy {accuracy:.4f}"
    )


if __name__ == "__main__":
    main()
