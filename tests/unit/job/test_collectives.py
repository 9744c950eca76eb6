"""Who records collectives; how the first that differs is found: `test_engines` of the workers."""

import pytest

from kerasdist.errors import JobError
from kerasdist.job.collectives import VARIABLE, CollectiveLog, log_if_wanted


def test_nothing_is_recorded_unless_it_is_asked_for():
    assert log_if_wanted({}) is None
    assert log_if_wanted({VARIABLE: "0"}) is None
    assert isinstance(log_if_wanted({VARIABLE: "1"}), CollectiveLog)
    with pytest.raises(JobError, match=f"Received: {VARIABLE}='yes'"):
        log_if_wanted({VARIABLE: "yes"})
