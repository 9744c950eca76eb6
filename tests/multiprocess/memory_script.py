"""Trains with backups in memory, and loses a worker or a host, and the disk, on the way.

python -m tests.multiprocess.memory_script FOLDER WHAT SHARDING

WHAT is lost in the first start: ``nothing``, ``worker`` or ``host``. The next start finds no file
on the disk, and none in the memory of the host that was lost: each simulated host has a folder of
its own, see `tests.multiprocess.hosts`.
"""

import json
import os
import shutil
import signal
import sys
from pathlib import Path

import numpy as np

import kerasdist as kd
from tests.multiprocess import hosts

FOLDER, WHAT, SHARDING = Path(sys.argv[1]), *sys.argv[2:]
RANK, RESTART = int(os.environ["KERASDIST_RANK"]), int(os.environ["KERASDIST_RESTART"])
ON = os.environ.get("ON", "here")
MEMORY = Path(os.environ["KERASDIST_MEMORY"])
BACKUPS, LOST = FOLDER / "backups", (1, 3)
begun = []  # of this process: what a callback has, a backup brings back

kd.config.set_draws("global")  # as there may be fewer workers afterwards
MEMORY.mkdir(exist_ok=True)
os.environ["KERASDIST_MEMORY"] = str(MEMORY / ON)
print(f"attempt {RESTART}: rank {RANK} on {ON}, memory {MEMORY}", flush=True)
if RESTART and RANK == 0:
    assert list(BACKUPS.glob("*.kdb")), "the disk had a backup as well"
    shutil.rmtree(BACKUPS)
    for gone in FOLDER.glob("down-*"):
        shutil.rmtree(MEMORY / gone.name.removeprefix("down-"), ignore_errors=True)
sharding = None if SHARDING == "none" else kd.Sharding(SHARDING, min_size=1)
strategy = kd.MultiWorkerMirroredStrategy(devices=["cpu:0"], sharding=sharding)
if "ON" in os.environ:
    hosts.say_where(FOLDER)

import keras  # noqa: E402


class Losing(keras.callbacks.Callback):
    """Loses what is to be lost, and notes where training begins."""

    def __init__(self):
        super().__init__()
        self.epoch = 0

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_begin(self, batch, logs=None):
        begun.append((self.epoch, batch))
        if RESTART or (self.epoch, batch) != LOST or WHAT == "nothing":
            return
        if WHAT == "host" and RANK == 1:
            # Which is to be the chief's, in a job that has it.
            (FOLDER / f"down-{hosts.NAMES[0]}").unlink(missing_ok=True)
            lost = hosts.NAMES[1]  # the chief's so far
            hosts.take_down(FOLDER, lost)
            supervisor = (FOLDER / f"worker-on-{lost}").read_text()
            os.kill(int(supervisor), signal.SIGKILL)
        elif WHAT != "host" and RANK == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def main():
    random = np.random.default_rng(0)
    x = random.normal(size=(40, 4)).astype("float32")
    y = np.sin(x[:, :1])
    keras.utils.set_random_seed(3)
    with strategy.scope():
        layers = [keras.layers.Dense(8, "tanh"), keras.layers.Dropout(0.2)]
        model = keras.Sequential([keras.Input((4,)), *layers, keras.layers.Dense(1)])
        model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    best = keras.callbacks.EarlyStopping("loss", patience=9, restore_best_weights=True)
    backup = kd.callbacks.BackupAndRestore(BACKUPS, save_freq=2, keep_in_memory=True)
    history = model.fit(
        x, y, batch_size=8, epochs=3, verbose=0, callbacks=[backup, best, Losing()]
    ).history
    print(f"from {begun[0]}", flush=True)
    values = [keras.ops.convert_to_numpy(one) for one in model.weights]
    values += [keras.ops.convert_to_numpy(one) for one in model.optimizer.variables]
    if strategy.is_chief:
        np.savez(FOLDER / "values.npz", *values)
        (FOLDER / "history.json").write_text(json.dumps(history))


main()
