"""How a worker and the chief recognize each other; wrong secrets and jobs: `test_gate`.

And where a worker finds the secret of its job.
"""

import pytest

from kerasdist.errors import JobError
from kerasdist.job import handshake
from kerasdist.job.handshake import Credentials, credentials

MINE = Credentials(b"a secret", "job 7")


def exchange(chief: Credentials, worker: Credentials):
    asked = handshake.challenge(chief)
    answered = handshake.answer(asked, worker)
    proof = handshake.reply(asked, answered, chief)
    handshake.check_proof(asked, answered, proof, worker)
    return asked, answered, proof


@pytest.mark.parametrize("mine", [MINE, Credentials(None, "job 7"), Credentials()])
def test_workers_of_one_job_recognize_each_other(mine):
    asked, answered, proof = exchange(mine, mine)
    assert "a secret" not in f"{asked}{answered}{proof}"


def test_a_secret_that_the_chief_lacks_is_named():
    with pytest.raises(JobError, match="one on this job's worker, none on the chief"):
        exchange(Credentials(None, "job 7"), MINE)


def test_a_replayed_answer_is_refused():
    """A stranger has listened to a worker, and says to the chief what the worker said."""
    _, answered, _ = exchange(MINE, MINE)
    with pytest.raises(handshake.RefusedError, match="KERASDIST_SECRET is not the one of this job"):
        handshake.reply(handshake.challenge(MINE), answered, MINE)


def test_a_chiefs_own_words_do_not_answer_it():
    """A stranger that opens a second connection, and hands back what the chief says there."""
    asked, answered, proof = exchange(MINE, MINE)
    with pytest.raises(handshake.RefusedError):
        handshake.reply(asked, {**answered, "digest": proof["digest"]}, MINE)


def test_a_stranger_at_the_chiefs_address_is_recognized():
    asked = handshake.challenge(MINE)
    answered = handshake.answer(asked, MINE)
    for proof in ({"type": "proof", "digest": answered["digest"]}, {"type": "proof"}, "proof", 7):
        with pytest.raises(ConnectionError):
            handshake.check_proof(asked, answered, proof, MINE)


@pytest.mark.parametrize(
    "message", [None, 1, [], {}, "challenge", {"type": "challenge", "job": 7}, {"type": "answer"}]
)
def test_what_is_not_a_message_of_ours_is_a_strangers(message):
    with pytest.raises(ConnectionError, match="not a kerasdist worker"):
        handshake.answer(message, MINE)
    with pytest.raises(ConnectionError, match="not a kerasdist worker"):
        handshake.reply(handshake.challenge(MINE), message, MINE)


def test_other_versions_are_named():
    with pytest.raises(JobError, match="protocol 4 here, 1 on the chief"):
        handshake.answer({**handshake.challenge(MINE), "protocol": 1}, MINE)


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
