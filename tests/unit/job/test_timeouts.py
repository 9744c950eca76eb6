"""How long workers wait, by the environment."""

import pytest

from kerasdist.errors import JobError
from kerasdist.job.protocol import Timeouts


def test_the_defaults_are_those_of_the_guide():
    assert Timeouts.of_environment({}) == Timeouts(join=300, heartbeat=60, meeting=600)


def test_variables_replace_them():
    environ = {"KERASDIST_HEARTBEAT_TIMEOUT": "2.5", "KERASDIST_JOIN_TIMEOUT": "7"}
    assert Timeouts.of_environment(environ) == Timeouts(join=7, heartbeat=2.5, meeting=600)


@pytest.mark.parametrize("text", ["soon", "", "0", "-3", "nan"])
def test_what_is_no_time_is_refused(text):
    with pytest.raises(JobError, match=f"KERASDIST_MEETING_TIMEOUT={text!r}"):
        Timeouts.of_environment({"KERASDIST_MEETING_TIMEOUT": text})
