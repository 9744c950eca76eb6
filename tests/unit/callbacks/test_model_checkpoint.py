"""Files that a thread writes: copies of the moment, waited for, whole whatever happens."""

import io
import signal
import subprocess
import sys
import zipfile
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
    def write(self, path):
        with open(path, "w") as file:
            file.write("half")
            file.flush()
            time.sleep(0.5)
            {within}
        super().write(path)

model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
file = BackgroundFile()
file.write(Slow(model, file.memory, weights_only=False), "m.keras")
"""


@pytest.fixture
def model():
    keras.utils.set_random_seed(2)
    kinds = [keras.layers.Dense(3), keras.layers.Dropout(0.5), keras.layers.BatchNormalization()]
    model = keras.Sequential([keras.Input((2,)), *kinds, keras.layers.Dense(1, dtype="bfloat16")])
    model.words = keras.layers.StringLookup()
    model.words.set_vocabulary(["a", "b"])
    model.compile(keras.optimizers.Adam(use_ema=True), "mse")
    model.optimizer.build(model.trainable_variables)
    return model


def snapshot(model, memory=None, *, weights_only=False):
    memory = keras_compat.Memory(list) if memory is None else memory
    return keras_compat.Snapshot(model, memory, weights_only=weights_only)


def members(path):
    """The files in a model's file; of that with the weights what it holds, by path."""
    with zipfile.ZipFile(path) as archive:
        found = {name: archive.read(name) for name in archive.namelist()}

    def note(name, one):
        value = np.array(one).tobytes() if isinstance(one, h5py.Dataset) else None
        found[name] = [{key: str(held) for key, held in one.attrs.items()}, value]

    with h5py.File(io.BytesIO(found.pop("model.weights.h5"))) as file:
        file.visititems(note)
    return found


def change(model):
    for variable in [*model.variables, *model.optimizer.variables]:
        variable.assign(variable + 1)
    model.layers[0].trainable = False
    model.words.set_vocabulary(["c", "d"])


def test_a_file_is_of_the_moment_of_the_copy(model, tmp_path):
    model.save(tmp_path / "now.keras")
    model.save_weights(tmp_path / "now.weights.h5")
    copies = [snapshot(model, weights_only=only) for only in (False, True)]
    change(model)
    for copy, name in zip(copies, ("later.keras", "later.weights.h5"), strict=True):
        copy.write(str(tmp_path / name))
    now, later = (members(tmp_path / name) for name in ("now.keras", "later.keras"))
    assert "assets/words/vocabulary.txt" in now
    for one in (now, later):
        del one["metadata.json"]
    assert later == now
    now, later = ((tmp_path / f"{name}.weights.h5").read_bytes() for name in ("now", "later"))
    assert later == now


def test_memory_is_used_again(model, tmp_path):
    memory = keras_compat.Memory(list)
    snapshot(model, memory, weights_only=True).write(str(tmp_path / "1.weights.h5"))
    held = {id(array) for arrays in memory.values() for array in arrays}
    change(model)
    second = snapshot(model, memory, weights_only=True)
    assert not any(memory.values())
    change(model)
    second.write(str(tmp_path / "2.weights.h5"))
    assert {id(array) for arrays in memory.values() for array in arrays} == held
    with (
        h5py.File(tmp_path / "1.weights.h5") as first,
        h5py.File(tmp_path / "2.weights.h5") as other,
    ):
        for path in ("layers/dense/vars/1", "optimizer/vars/0"):
            np.testing.assert_array_equal(np.array(first[path]) + 1, np.array(other[path]))


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


def test_an_error_is_raised_once(model, tmp_path):
    file = BackgroundFile()
    path = tmp_path / "missing" / "m.keras"
    file.write(snapshot(model), str(path))
    with pytest.raises(OSError, match="No such file") as caught:
        file.wait()
    assert caught.value.__notes__ == [
        "kerasdist.callbacks.ModelCheckpoint was writing in the background."
    ]
    file.wait()
    file.check()


def test_an_error_that_nothing_raises_is_told(model, tmp_path):
    file = BackgroundFile()
    file.write(snapshot(model), str(tmp_path / "x" / "m.keras"))
    with pytest.warns(UserWarning, match="has not written a file .* FileNotFoundError"):
        file.settle()
    file.settle()


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
