"""A backup of some workers and one `sharding` is restored, bit by bit, under any other."""

import re

import pytest

from tests.multiprocess import launching
from tests.multiprocess.forks import Ended, nursery, report

SECONDS = 300
BACKUPS = "tests.multiprocess.backups_script"
# How many workers (1: a process without a job) and which `sharding`, and after which epoch they
# stop. The first trains. Who stops after the same epoch as the one before only restores.
RUNS = {
    "jax": ((2, "full", 1), (1, "none", 1), (2, "optimizer", 1)),
    "torch": ((2, "full", 1), (1, "none", 2), (3, "optimizer", 2)),
}


def run(backend: str, workers: int, *command: object, code: int = 0, **more: str) -> list[Ended]:
    """Runs a script on any number of workers, who are forked; one alone is in no job."""
    environments = launching.job_of(workers, **more) if workers > 1 else [more]
    ended = nursery(backend).begin([*map(str, command)], environments).join(SECONDS)
    assert [one.code for one in ended] == [code] * workers, report(ended)
    return ended


@pytest.mark.parametrize("backend", RUNS)
def test_another_number_of_workers_and_another_sharding(backend, tmp_path):
    trained, state = 0, None
    for workers, sharding, epochs in RUNS[backend]:
        ended = run(backend, workers, BACKUPS, tmp_path, sharding, epochs)
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


@pytest.mark.parametrize("sharding", ["full", "optimizer"])
@pytest.mark.parametrize("backend", RUNS)
def test_memory_has_about_one_variable_more_than_the_state(backend, sharding, tmp_path):
    """While a backup is written, and read by a second job, on every worker."""
    width, states = 512, set()
    for taking in ("save", "on_train_begin"):
        ended = run(backend, 2, BACKUPS, tmp_path, sharding, 1, width)
        states.update(re.findall(r"state (\w+)", ended[0].output))
        for one in ended:
            [taken] = re.findall(rf"{taking} took (\d+)", one.output)
            # To read, others than torch may keep what NumPy has read as the variable.
            is_bound = backend == "torch" or taking == "save"
            assert not is_bound or int(taken) < 2.3 * 4 * width**2, report(ended)
    assert len(states) == 1


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


def test_an_error_after_fit_trains_no_epoch_again(tmp_path):
    """The restart of a run whose `fit` had ended goes on behind it.

    Its workers have the launcher's variables. Without them: `restarts.two_calls_of_fit`.
    """
    script = launching.write(tmp_path, SCRIPT)
    # The second job does not take the first one's result for its own.
    for job, restart, seen, lines in (("a", 0, 12, 5), ("a", 1, 0, 5), ("b", 0, 12, 9)):
        variables = {"KERASDIST_RESTART": str(restart), "KERASDIST_JOB_ID": f"{job}-{restart}"}
        ended = run("torch", 2, script, code=1 - restart, **variables)
        for one in ended:
            assert f"seen {seen} of 4" in one.output, report(ended)
        assert len((tmp_path / "log.csv").read_text().splitlines()) == lines
        assert bool(list((tmp_path / "backups").iterdir())) == (restart == 0)
