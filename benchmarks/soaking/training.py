"""The training run that the soak interrupts; the launcher starts it, again and again.

    python training.py FOLDER EPOCHS SEED [elastic [calm]]

It draws random numbers wherever a run does: initial weights, the order of the data, dropout; and
what it trains on, by which optimizer, beside which callbacks, chance decides (`jobs.py`). What has
become of it, each worker writes to `FOLDER/result-RANK.npz` and `.json`.

A job of a changing size trains in float64, draws for the global batch, and ends with the epoch in
which it is told that it is enough. Nothing slows down the run that it is compared with (``calm``).
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
from pathlib import Path

from marks import BREAK, END, ENOUGH, Teller

FOLDER = Path(sys.argv[1])
EPOCHS, SEED = int(sys.argv[2]), int(sys.argv[3])
ELASTIC, CALM = "elastic" in sys.argv[4:], "calm" in sys.argv[4:]
TELLER = Teller(FOLDER / "marks")

import jobs  # noqa: E402
import keras  # noqa: E402
import numpy as np  # noqa: E402

import kerasdist as kd  # noqa: E402
from tests.conformance.double import double_precision  # noqa: E402

ROWS, VALIDATION_ROWS, FEATURES, CLASSES = 304, 70, 20, 4
SAVE_EVERY = 5  # batches

STEP_SECONDS = 0.0 if CALM else 0.02
"""What a batch takes at least, so that strikes fall between all of them."""

DISK_SECONDS = 0.0 if CALM else 0.05
"""What the disk takes to flush: the time in which a strike finds a backup half done."""


class Pace(keras.callbacks.Callback):
    """Tells what is being done, and slows it down.

    It sees steps alone: a run that goes on from a backup mutes callbacks while it skips batches.
    """

    def on_train_batch_end(self, batch, logs=None):
        TELLER.tell("epoch")
        time.sleep(STEP_SECONDS)

    def on_test_begin(self, logs=None):
        TELLER.tell("validation")

    def on_test_batch_end(self, batch, logs=None):
        time.sleep(STEP_SECONDS)

    def on_test_end(self, logs=None):
        TELLER.tell("epoch")

    def on_epoch_end(self, epoch, logs=None):
        self.model.stop_training |= (FOLDER / ENOUGH).exists()


def slow_down_the_disk() -> None:
    """Makes a backup's two flushes slow: of the file before it has its name, and of the folder."""
    flush = os.fsync

    def fsync(descriptor: int) -> None:
        with TELLER.during("backup"):
            time.sleep(DISK_SECONDS)
            flush(descriptor)

    os.fsync = fsync


def break_when_told() -> None:
    """Breaks the connections by which this worker's collectives go, but not that to the job."""
    of_job = int(os.environ["KERASDIST_COORDINATOR"].rpartition(":")[2])
    told = FOLDER / BREAK
    while not told.exists() or told.read_text(encoding="utf-8") != str(os.getpid()):
        time.sleep(0.02)
    for file in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # a file that is closed, a socket that listens
            if str(file.readlink()).startswith("socket:"):
                with socket.socket(fileno=os.dup(int(file.name))) as one:
                    if one.family == socket.AF_UNIX:
                        continue
                    if of_job not in (one.getpeername()[1], one.getsockname()[1]):
                        one.shutdown(socket.SHUT_RDWR)


def rows(number: int, seed: int):
    generator = np.random.default_rng(seed)
    x = generator.normal(size=(number, FEATURES)).astype("float32")
    y = np.argmax(x[:, :CLASSES] + generator.normal(size=(number, CLASSES)), axis=1)
    return x, y.astype("int32")


def network():
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((FEATURES,)),
            layers.Dense(32, activation="relu"),
            layers.BatchNormalization(),
            layers.Dropout(0.3),
            layers.Dense(32, activation="relu"),
            layers.Dropout(0.3),
            layers.Dense(CLASSES, activation="softmax"),
        ]
    )


def keep(model, history) -> None:
    """Writes what a run is for: weights, the optimizer's state, seeds, metrics, the history."""
    variables = [*model.variables, *model.optimizer.variables, *model.metrics_variables]
    arrays = {
        f"{index:03d} {variable.path}": keras.ops.convert_to_numpy(variable)
        for index, variable in enumerate(variables)
    }
    path = FOLDER / f"result-{os.environ['KERASDIST_RANK']}"
    np.savez(path.with_suffix(".npz"), **arrays)
    log = FOLDER / "lines.csv"
    facts = {
        "history": history.history,
        "epochs": history.epoch,
        "lengths": TELLER.lengths(),
        "lines": log.read_text(encoding="utf-8").splitlines() if log.exists() else [],
    }
    path.with_suffix(".json").write_text(json.dumps(facts, default=float), encoding="utf-8")


def main() -> None:
    slow_down_the_disk()
    if ELASTIC:
        kd.config.set_draws("global")
        threading.Thread(target=break_when_told, daemon=True).start()
    strategy = kd.MultiWorkerMirroredStrategy()
    keras.utils.set_random_seed(SEED)
    with strategy.scope():
        model = network()
        optimizer = jobs.optimizer(SEED)
        model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
    TELLER.tell("compile")
    print(jobs.described(SEED))
    history = model.fit(
        **jobs.data(*rows(ROWS, 1), SEED),
        epochs=EPOCHS,
        validation_data=rows(VALIDATION_ROWS, 2),
        validation_batch_size=jobs.BATCH,
        callbacks=[
            Pace(),
            *jobs.callbacks(FOLDER, SEED),
            kd.callbacks.BackupAndRestore(FOLDER / "backups", save_freq=SAVE_EVERY),
        ],
        verbose=0,
    )
    TELLER.tell(END)
    keep(model, history)


if __name__ == "__main__":
    with double_precision(keras.backend.backend()) if ELASTIC else contextlib.nullcontext():
        main()
