"""Backups on disk: whole or not there."""

import hashlib
import json
import resource
import warnings
import weakref
from functools import partial

import ml_dtypes
import numpy as np
import pytest

from kerasdist.callbacks.backup import run_files, storage
from kerasdist.callbacks.backup.storage import Unread
from kerasdist.errors import BackupError
from tests.unit.callbacks import backups

ARRAYS = [
    np.arange(6, dtype="float32").reshape(2, 3),
    np.array(7, dtype="int64"),
    np.zeros((0, 4), dtype="uint8"),
    np.array([1.5, -2.0], dtype=ml_dtypes.bfloat16),
    np.array([[True, False]]),
    np.arange(6.0).reshape(2, 3).T,
]


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "backups"


def written(folder, number=3):
    return backups.write(folder, number, {"epoch": 2, "best": float("inf")}, ARRAYS)


def test_what_is_written_is_read(folder):
    path = written(folder)
    assert list(folder.iterdir()) == [path]
    backup = storage.read(path)
    assert backup.facts == {"epoch": 2, "best": float("inf")}
    for number, expected in enumerate(ARRAYS):
        found = backup.array(number)
        assert found.dtype == expected.dtype
        assert found.shape == expected.shape
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    ("cut", "changed"),
    [*((cut, None) for cut in (1, 31, 33, 200)), *((None, at) for at in (20, 40, -40, -1))],
)
def test_a_torn_or_changed_file_is_refused(folder, cut, changed):
    path = written(folder)
    content = bytearray(path.read_bytes())
    if cut:
        del content[-cut:]
    else:
        content[changed] ^= 1
    path.write_bytes(content)
    with pytest.raises(BackupError, match="it is torn"):
        storage.read(path)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"kerasdist backup 9\n" + b"x" * 100])
def test_another_file_is_refused(folder, content):
    path = written(folder)
    path.write_bytes(content)
    with pytest.raises(BackupError, match="another version of kerasdist, or no backup"):
        storage.read(path)


def test_a_failure_leaves_the_old_file(folder):
    path = written(folder)
    before = path.read_bytes()
    with pytest.raises(TypeError):
        backups.write(folder, 3, {"epoch": object()}, ARRAYS)
    assert path.read_bytes() == before
    assert list(folder.iterdir()) == [path]


def test_arrays_are_read_one_by_one_while_they_are_written(folder):
    made, alive = [], []

    class Array(np.ndarray):
        pass

    def read(number):
        array = np.full(4, number, "float32").view(Array)
        made.append(weakref.ref(array))
        alive.append(sum(one() is not None for one in made))
        return array

    later = [Unread(np.dtype("float32"), (4,), partial(read, number)) for number in range(3)]
    stored = storage.read(backups.write(folder, 1, {}, [*later, None, ARRAYS[0]]))
    assert alive == [1, 1, 1]
    assert stored.forms[3] is None
    np.testing.assert_array_equal(stored.array(2), np.full(4, 2.0))
    np.testing.assert_array_equal(stored.array(4), ARRAYS[0])


def test_a_variable_that_changes_its_form_meanwhile_is_an_error(folder):
    later = Unread(np.dtype("float32"), (4,), lambda: np.ones(3, "float32"))
    with pytest.raises(ValueError, match=r"Expected .*\[4\]\]\. Received: .*\[3\]\. Change no"):
        backups.write(folder, 1, {}, [later])
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    "header",
    [
        *([], "facts", 3, {}, {"facts": {}}, {"facts": [1], "arrays": []}),
        *({"facts": {}, "arrays": 3}, {"facts": {}, "arrays": [3]}),
        *({"facts": {}, "arrays": [["no type", [1]]]}, {"facts": {}, "arrays": [["int8", "one"]]}),
    ],
)
def test_a_header_of_another_form_is_refused(folder, header):
    folder.mkdir()
    path = folder / "backup-000000000003.kdb"
    text = json.dumps(header).encode()
    content = storage._MAGIC + len(text).to_bytes(8, "big") + text
    path.write_bytes(content + hashlib.sha256(content).digest())
    with pytest.raises(BackupError, match="not of the form that kerasdist writes"):
        storage.read(path)


def test_all_arrays_are_read_though_the_disk_is_full(folder):
    """Workers gather some variables together; none may stop in between."""
    read = []

    def array(number):
        read.append(number)
        return np.zeros(4096, "float32")

    arrays = [
        Unread(np.dtype("float32"), (4096,), partial(array, one), f"layer/kernel_{one}")
        for one in range(6)
    ]
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, before[1]))
    try:
        with pytest.raises(OSError, match=r"at the variable 'layer/kernel_2', in: .*03.kdb"):
            backups.write(folder, 3, {}, arrays)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert read == list(range(6))
    assert list(folder.iterdir()) == []


def test_a_restarted_call_leaves_the_backups_of_a_later_one(tmp_path, monkeypatch):
    """Under the launcher the last backup of a call stays until the script ends (its mark says so).

    A script that calls `fit` twice with a folder, and dies in the second call, ends the first one
    twice.
    """
    monkeypatch.setenv("KERASDIST_RESTART", "0")
    monkeypatch.setenv("KERASDIST_JOB_ID", "run-0")

    def call(number):
        files = run_files.RunFiles(tmp_path, 2)
        found = files.newest({})
        files.begin_next()
        files.write({"fit": number}, [np.arange(3.0)])
        return files, None if found is None else int(found.chiefs.facts["fit"])

    for found_in_the_second in (None, 1):
        run_files._ENDED.clear()  # as a new process does
        # The first call trains again, and says so.
        with warnings.catch_warnings(action="ignore", category=UserWarning):
            files, found = call(0)
        assert found is None
        files.training_ended(removes=True)
        files, found = call(1)
        assert found == found_in_the_second
        run_files.release_folder(tmp_path)
