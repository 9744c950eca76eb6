"""The meaning of how workers ended: the worker to blame, and the launcher's exit code."""

import signal

import pytest

from kerasdist.cli.launch.spec import AttemptResult, WorkerExit
from kerasdist.job.interruption import ExitCode

LOST, PREEMPTED = ExitCode.LOST_WORKER, ExitCode.PREEMPTED


def attempt(*codes, stopped=(), stop_signal=None):
    """Endings in the order of time: rank 0 first."""
    endings = (
        WorkerExit(rank, code, float(rank), rank in stopped, False, ())
        for rank, code in enumerate(codes)
    )
    return AttemptResult(tuple(endings), stop_signal)


@pytest.mark.parametrize(
    ("result", "cause", "code", "failed"),
    [
        (attempt(0, 0), None, 0, False),
        (attempt(0, 3), 1, 3, True),
        (attempt(4, 3), 0, 4, True),
        (attempt(143, 3, stopped=[0]), 1, 3, True),
        (attempt(LOST, LOST, 137), 2, 137, True),
        (attempt(LOST, LOST), 0, LOST, True),
        (attempt(LOST, 137, stopped=[1]), 0, LOST, True),
        (attempt(PREEMPTED, PREEMPTED), 0, PREEMPTED, False),
        (attempt(0, PREEMPTED), 1, PREEMPTED, False),
        (attempt(PREEMPTED, LOST), 1, LOST, True),
        (attempt(PREEMPTED, 1), 1, 1, True),
        (attempt(PREEMPTED, 137, stopped=[1]), 0, PREEMPTED, False),
        (attempt(143, 143, stopped=[0, 1], stop_signal=signal.SIGTERM), None, 143, False),
        (attempt(0, 0, stopped=[0, 1], stop_signal=signal.SIGINT), None, 0, False),
        (attempt(0, 1, stopped=[0, 1], stop_signal=signal.SIGINT), None, 130, False),
        (attempt(76, 76, stopped=[0, 1], stop_signal=signal.SIGTERM), None, 76, False),
    ],
)
def test_what_an_attempt_means(result, cause, code, failed):
    assert (result.cause and result.cause.rank) == cause
    assert result.exit_code == code
    assert result.failed is failed


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (1, "exit code 1"),
        (137, "ended by SIGKILL"),
        (139, "ended by SIGSEGV"),
        (255, "exit code 255"),
        (LOST, "because another worker was lost"),
        (PREEMPTED, "preempted"),
    ],
)
def test_a_code_in_words(code, words):
    assert words in attempt(code).endings[0].reason
