"""A backup of some workers and one `sharding` is restored, bit by bit, under any other."""

import re
from dataclasses import dataclass

import pytest

from kerasdist.launch.placement import free_port
from tests.environment import CPU_DEVICES, values
from tests.multiprocess import launching
from tests.multiprocess.forks import Nursery
from tests.multiprocess.processes import Ended, report

SECONDS = 300
BACKUPS = "tests.multiprocess.backups_script"
MEMORY = "tests.multiprocess.backups_memory_script"
# How many workers (1: a process without a job) and which `sharding`, and after which epoch they
# stop. The first trains. Who stops after the same epoch as the one before only restores.
RUNS = {
    "jax": ((2, "full", 1), (1, "none", 1), (2, "optimizer", 1)),
    "torch": ((2, "full", 1), (1, "none", 2), (3, "optimizer", 2)),
}


@dataclass(frozen=True)
class Scripts:
    """Scripts on any number of workers of a backend, who are forked."""

    backend: str
    nursery: Nursery

    def run(self, workers: int, *command: object) -> list[Ended]:
        common = {}
        if workers > 1:
            address = f"localhost:{free_port()}"
            common = {"KERASDIST_WORKERS": str(workers), "KERASDIST_COORDINATOR": address}
        ranks = [{"KERASDIST_RANK": str(rank)} if common else {} for rank in range(workers)]
        job = self.nursery.begin(list(map(str, command)), [common | rank for rank in ranks])
        ended = job.join(SECONDS)
        assert [one.code for one in ended] == [0] * workers, report(ended)
        return ended


@pytest.fixture(scope="module", params=RUNS)
def scripts(request):
    with Nursery("-m", "tests.multiprocess.forks", request.param) as nursery:
        yield Scripts(request.param, nursery)


def test_another_number_of_workers_and_another_sharding(scripts, tmp_path):
    trained, state = 0, None
    for workers, sharding, epochs in RUNS[scripts.backend]:
        ended = scripts.run(workers, BACKUPS, tmp_path, sharding, epochs)
        found = re.search(r"(\d+) batches, state (\w+)", ended[0].output)
        assert found, report(ended)
        batches, digest = int(found[1]), found[2]
        assert batches == 3 * (epochs - trained)
        if epochs == trained:
            assert digest == state, f"{workers} workers with sharding={sharding!r}"
        trained, state = epochs, digest
        newest = max(tmp_path.glob("backup-*[0-9].kdb")).stem
        parts = len(list(tmp_path.glob(f"{newest}-*-part*.kdb")))
        if batches:
            assert parts == (workers if sharding != "none" else 0)


def test_memory_has_about_one_variable_more_than_the_state(scripts, tmp_path):
    """While a backup is written and read, on every worker."""
    shardings = ["full", "optimizer"]
    ended = scripts.run(2, MEMORY, tmp_path, *shardings)
    for one in ended:
        found = re.findall(r"(\w+): largest (\d+), writing (\d+) (\d+), reading (\d+)", one.output)
        assert [sharding for sharding, *_ in found] == shardings, report(ended)
        for _, *numbers in found:
            largest, *written, read = map(int, numbers)
            assert max(written) < 2.3 * largest, report(ended)
            # The others may keep what NumPy has read as the variable.
            if scripts.backend == "torch":
                assert read < 2.3 * largest, report(ended)


SCRIPT = """
import numpy as np
import kerasdist as kd
import keras
strategy = kd.MultiWorkerMirroredStrategy(devices=["cpu:0"])
keras.utils.set_random_seed(3)
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("adam", "mse")
x = np.random.default_rng(0).normal(size=(12, 4)).astype("float32")
seen = []
callbacks = [
    kd.callbacks.BackupAndRestore(here / "backups"),
    keras.callbacks.CSVLogger(here / "log.csv", append=True),
    keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(batch)),
]
history = model.fit(x, x[:, :1], batch_size=4, epochs=4, verbose=0, callbacks=callbacks)
print("seen", len(seen), "of", len(history.epoch), flush=True)
if restart == 0:
    raise ValueError("after fit")
"""


def test_defect_30_an_error_after_fit_trains_no_epoch_again(tmp_path):
    """DEFECTS 30: the restart of a run whose `fit` had ended goes on behind it.

    Without the launcher, on each backend: `restarts.two_calls_of_fit`.
    """
    script = launching.write(tmp_path, SCRIPT)
    common = {"KERAS_BACKEND": "torch", **values(CPU_DEVICES)}
    # The second job does not take the first one's result for its own.
    for number, (restarts, seen) in enumerate(
        ((1, ["12 of 4"] * 2 + ["0 of 4"] * 2), (0, ["12 of 4"] * 2))
    ):
        call = ("run", "--workers", 2, "--max-restarts", restarts, script)
        done = launching.finish(*call, seconds=SECONDS, **common)
        assert done.returncode == 1 - restarts, done.stderr
        assert re.findall(r"seen (\d+ of \d+)", done.stdout) == seen
        assert len((tmp_path / "log.csv").read_text().splitlines()) == 5 + 4 * number
        if restarts:
            assert list((tmp_path / "backups").iterdir()) == []
