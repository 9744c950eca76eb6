"""How a worker and the chief recognize each other; wrong secrets and jobs: `test_gate`."""

import pytest

from kerasdist.errors import JobError
from kerasdist.job import handshake
from kerasdist.job.handshake import Credentials

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
