"""`kd.config`, whose numbers tests/conformance compares: `cases_random.py`, `cases_passes.py`."""

import pytest

from kerasdist import config


def test_what_is_refused():
    with pytest.raises(ValueError, match=r"'replica' or 'global'\. Received: draws='all'"):
        config.set_draws("all")
    assert config.draws() == "replica"
    with pytest.raises(ValueError, match=r"positive number of examples\. Received: count=0"):
        config.set_most_examples_at_once(0)
    with pytest.raises(TypeError):
        config.set_most_examples_at_once(1.5)
