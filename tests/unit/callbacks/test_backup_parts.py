"""Parts of backups that are missing or spoilt are refused.

That workers read them in any other division: `test_sharded_backups` of the workers; that each reads
its own alone, and which parts go: their cases `sharded_backups`.
"""

import itertools
import math

import ml_dtypes
import numpy as np
import pytest

from kerasdist.callbacks.backup import storage, variables
from kerasdist.callbacks.backup.variables import StoredVariables
from kerasdist.core.sharding import HeldShard, Region
from kerasdist.errors import BackupError
from tests.unit.callbacks import backups

VALUES = [
    np.arange(48, dtype="float32").reshape(2, 6, 4),
    np.array(7, dtype="int32"),
    np.arange(10).astype(ml_dtypes.bfloat16),
]
SHARDED = (0, 2)
RUN = "0123abcd"


def flat(shape, workers):
    """As PyTorch divides: the last parts are shorter, or empty."""
    size = math.prod(shape)
    length = -(-size // workers)
    ends = [min(size, rank * length) for rank in range(workers + 1)]
    return [Region(1, *pair) for pair in itertools.pairwise(ends)]


def shard(value, region):
    def read():
        return value.reshape(region.rows, -1)[:, region.begin : region.end]

    return HeldShard(region, value.dtype.name, read, lambda _: None)


def written(folder, workers=2, number=3, without=()):
    """A backup in parts; ``without`` the parts of these workers."""
    folder.mkdir(exist_ok=True)
    parts = []
    for rank in range(workers):
        shards = {
            one: [shard(VALUES[one], flat(VALUES[one].shape, workers)[rank])] for one in SHARDED
        }
        path = storage.path_of(folder, number, f"-{RUN}-part{rank}")
        parts.append(variables.write_part(path, shards))
    named = [part for rank, part in enumerate(parts) if rank not in without]
    forms = {
        f"variable {one}": [list(value.shape), value.dtype.name] for one, value in enumerate(VALUES)
    }
    facts = {"forms": forms, "parts": named}
    arrays = [None if one in SHARDED else value for one, value in enumerate(VALUES)]
    return backups.write(folder, number, facts, [*arrays, np.ones(3)])


def test_parts_that_are_not_all_are_refused(tmp_path):
    path = written(tmp_path, workers=3, without=(1,))
    with pytest.raises(BackupError, match="not the whole of variable 0"):
        StoredVariables(storage.read(path))


def torn(part):
    part.write_bytes(part.read_bytes()[:-7])


def changed(part):
    content = bytearray(part.read_bytes())
    content[-40] ^= 1
    part.write_bytes(content)


def missing(part):
    part.unlink()


def of_another_backup(part):
    other = part.with_name(part.name.replace("000003", "000002"))
    part.write_bytes(other.read_bytes())


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (torn, r"of its part backup-\d+-0123abcd-part1.kdb, its \d+ bytes are not .*: it is torn"),
        (changed, r"of its part .*part1.kdb, its \d+ bytes are not those that were written"),
        (missing, "its part .*part1.kdb cannot be read: .*No such file"),
        (of_another_backup, "of its part .*part1.kdb, it is a file of another backup"),
    ],
)
def test_a_spoilt_part_is_refused(tmp_path, monkeypatch, spoil, complaint):
    monkeypatch.setitem(globals(), "VALUES", [value + value for value in VALUES])
    written(tmp_path, number=2)
    monkeypatch.undo()
    path = written(tmp_path)
    parts = storage.read(path).facts["parts"]
    variables.require_whole_parts(tmp_path, parts)
    spoil(tmp_path / parts[1][0])
    variables.require_whole_parts(tmp_path, parts[:1])
    with pytest.raises(BackupError, match=complaint):
        variables.require_whole_parts(tmp_path, parts)


def test_parts_of_a_file_of_another_version_stay(tmp_path):
    path = written(tmp_path, number=2)
    path.write_bytes(b"kerasdist backup 9\n" + path.read_bytes())
    written(tmp_path, number=1).unlink()
    variables.remove_orphans(tmp_path)
    assert [one.name[7:19] for one in tmp_path.glob("*part*")] == ["000000000002"] * 2
