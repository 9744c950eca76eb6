"""Copies of backups in memory: what goes where, and what is read."""

import warnings
from types import SimpleNamespace

import numpy as np
import pytest

import kerasdist as kd
from kerasdist.callbacks.backup import memory, storage
from kerasdist.callbacks.backup.run_files import RunFiles
from kerasdist.job.launcher import MEMORY
from tests.unit.callbacks import backups

ARRAY = np.arange(5.0)


def written(folder, numbers):
    files = RunFiles(folder / "disk", 2, in_memory=folder / "memory")
    for number in numbers:
        files.number = number - 1
        files.begin_next()
        assert files.write({"fit": 0, "number": number}, [ARRAY + number])
    files.wait()
    return files


def numbers(folder):
    return [storage.number_of(path) for path in storage.newest_first(folder)]


@pytest.mark.parametrize(
    ("torn", "found"), [((), "memory"), (("memory",), "disk"), (("memory", "disk"), "memory")]
)
def test_that_in_memory_is_read_first_and_a_torn_one_is_not(tmp_path, torn, found):
    files = written(tmp_path, [1, 2])
    for name in torn:
        path = tmp_path / name / "backup-000000000002.kdb"
        path.write_bytes(path.read_bytes()[:-3])
    files = RunFiles(tmp_path / "disk", 2, in_memory=tmp_path / "memory")
    with warnings.catch_warnings(record=True, action="always") as told:
        stored = files.newest({})
    assert len(told) == len(torn)
    assert stored.chiefs.path.parent.name == found
    assert stored.chiefs.facts["number"] == (1 if len(torn) == 2 else 2)


def test_what_does_not_fit_goes_to_the_disk_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(memory.shutil, "disk_usage", lambda _: SimpleNamespace(free=39))
    with pytest.warns(UserWarning, match=r"Expected 40 free bytes .* Received: 39 free bytes"):
        written(tmp_path, [1])
    assert numbers(tmp_path / "memory") == []
    assert numbers(tmp_path / "disk") == [1]


def test_the_copy_on_the_disk_is_private_from_its_first_byte(tmp_path, monkeypatch):
    modes, read = [], storage.read_bytes

    def reading(file):
        for chunk in read(file):
            [unfinished] = (tmp_path / "disk").glob("unfinished-*")
            modes.append(unfinished.stat().st_mode & 0o777)
            yield chunk

    monkeypatch.setattr(storage, "read_bytes", reading)
    written(tmp_path, [1])
    assert modes == [0o600]


def test_what_a_later_call_of_fit_has_in_memory_stays(tmp_path):
    """A first call that trains again removes its own; on workers beside the chief as well."""
    files = written(tmp_path, [1])
    later = backups.write(tmp_path / "memory", 2, {"fit": 1, "number": 2}, [ARRAY])
    files.training_ended(removes=False)
    assert storage.newest_first(tmp_path / "memory") == [later]


def test_only_this_user_can_look_into_the_folder(tmp_path, monkeypatch):
    there = tmp_path / "job"
    there.mkdir(mode=0o755)
    monkeypatch.setenv(MEMORY, str(there))
    memory.prepare(tmp_path, None, sends=True)
    assert there.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("by", ["link", "file", "another user"])
def test_the_folder_of_another_is_refused(tmp_path, monkeypatch, by):
    there = tmp_path / "job"
    monkeypatch.setenv(MEMORY, str(there))
    if by == "link":
        (tmp_path / "elsewhere").mkdir()
        there.symlink_to(tmp_path / "elsewhere")
    elif by == "file":
        there.touch()
    else:
        monkeypatch.setattr(memory.os, "geteuid", lambda: there.stat().st_uid + 1)
    with pytest.raises(kd.errors.UnsupportedError, match="Expected a folder of this user"):
        memory.prepare(tmp_path, None, sends=True)


def test_without_a_launcher_it_is_refused(tmp_path, monkeypatch):
    monkeypatch.delenv(MEMORY, raising=False)
    with pytest.raises(kd.errors.UnsupportedError, match="Expected a worker of `kerasdist run`"):
        memory.prepare(tmp_path, None, sends=True)


def test_calls_of_fit_with_other_folders_have_other_copies(tmp_path, monkeypatch):
    monkeypatch.setenv(MEMORY, str(tmp_path))
    one, other = (memory.prepare(tmp_path / name, None, sends=True) for name in ("a", "b"))
    assert one != other
    assert one == memory.prepare(tmp_path / "a" / ".", None, sends=True)
