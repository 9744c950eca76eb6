"""Where a worker finds the secret of its job."""

import pytest

from kerasdist.errors import JobError
from kerasdist.job.handshake import Credentials, credentials


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "secret"
    path.write_text("from a file\n", "utf-8")
    path.chmod(0o600)
    return path


def test_it_comes_from_a_variable_or_from_a_file(file):
    assert credentials({}) == Credentials(None, "")
    assert credentials({"KERASDIST_SECRET": " mine "}) == Credentials(b"mine")
    named = {"KERASDIST_SECRET_FILE": str(file), "KERASDIST_JOB_ID": "7"}
    assert credentials(named) == Credentials(b"from a file", "7")
    assert credentials({**named, "KERASDIST_SECRET": "mine"}).secret == b"mine"


def test_it_is_not_shown():
    assert "mine" not in repr(credentials({"KERASDIST_SECRET": "mine"}))


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644])
def test_a_file_that_others_may_read_is_refused(file, mode):
    file.chmod(mode)
    with pytest.raises(JobError, match=f"readable by its owner alone.*{mode:o}.*chmod 600"):
        credentials({"KERASDIST_SECRET_FILE": str(file)})


def test_a_file_that_is_missing_or_empty_is_refused(file, tmp_path):
    file.write_text("\n", "utf-8")
    with pytest.raises(JobError, match="which is empty"):
        credentials({"KERASDIST_SECRET_FILE": str(file)})
    with pytest.raises(JobError, match="No such file"):
        credentials({"KERASDIST_SECRET_FILE": str(tmp_path / "none")})
