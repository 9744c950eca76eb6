"""Files that a thread writes are whole, and errors are told, whatever happens.

That they are those of Keras, of the moment, show the exactness suite's cases `async_checkpoint`.
"""

import gc
import signal
import subprocess
import sys
import weakref
from typing import Any

import h5py
import keras
import ml_dtypes
import numpy as np
import pytest

from kerasdist import keras_compat
from kerasdist.callbacks.model_checkpoint import BackgroundFile
from tests.environment import ABSENT, ROOT

# Keras's variables on NumPy, by which Keras itself saves.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

# A script that writes a file in the background, and ends at once.
SCRIPT = """
import os, signal, time
import keras
from kerasdist import keras_compat
from kerasdist.callbacks.model_checkpoint import BackgroundFile

class Slow(keras_compat.Snapshot):
    def _write(self, path):
        with open(path, "w") as file:
            file.write("half")
            file.flush()
            time.sleep(0.5)
            {within}
        super()._write(path)

model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
file = BackgroundFile()
file.write(Slow(model, file.memory, weights_only=False), "m.keras")
"""


@pytest.fixture
def model():
    return keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])


def snapshot(model, *, weights_only=False):
    return keras_compat.Snapshot(model, keras_compat.Memory(list), weights_only=weights_only)


def test_a_writer_goes_with_its_last_file(tmp_path, model):
    file = BackgroundFile()
    file.write(snapshot(model), str(tmp_path / "m.keras"))
    file.wait()
    reference = weakref.ref(file)
    del file
    gc.collect()
    assert reference() is None


def test_an_array_of_a_layer_is_copied(tmp_path):
    held: Any = np.array([1.5, 2.5], dtype=ml_dtypes.bfloat16)

    class Own(keras.layers.Layer):
        def save_own_variables(self, store):
            store["held"] = held
            assert list(store.keys()) == ["held"]

    model = keras.Sequential([keras.Input((2,)), Own()])
    copy = snapshot(model, weights_only=True)
    held += 1
    copy.write(str(tmp_path / "m.weights.h5"))
    with h5py.File(tmp_path / "m.weights.h5") as file:
        stored = file["layers/own/vars/held"]
        assert stored.attrs["dtype"] == "bfloat16"
        assert np.array(stored).view(ml_dtypes.bfloat16).tolist() == [1.5, 2.5]


def test_a_layer_that_cannot_be_saved_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    class Own(keras.layers.Layer):
        def save_own_variables(self, store):
            raise RuntimeError("no state")

    model = keras.Sequential([keras.Input((2,)), Own()])
    with pytest.raises(RuntimeError, match="no state"):
        snapshot(model)
    assert not list(tmp_path.iterdir())


def run(folder, within):
    environment = {"KERAS_BACKEND": "numpy", "PYTHONPATH": f"{ABSENT}:{ROOT}", "PATH": ""}
    return subprocess.run(
        [sys.executable, "-c", SCRIPT.replace("{within}", within)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_a_kill_leaves_the_old_file(model, tmp_path):
    model.save(tmp_path / "m.keras")
    before = (tmp_path / "m.keras").read_bytes()
    ended = run(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)")
    assert ended.returncode == -signal.SIGKILL
    assert (tmp_path / "m.keras").read_bytes() == before


def test_an_error_is_told_at_the_end_of_the_process(tmp_path):
    ended = run(tmp_path, "raise OSError(28, 'No space left on device')")
    assert "UserWarning: ModelCheckpoint has not written a file" in ended.stderr
    assert "No space left on device" in ended.stderr
    assert not list(tmp_path.iterdir())
