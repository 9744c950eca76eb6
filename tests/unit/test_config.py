"""`kd.config.set_draws`, whose numbers tests/conformance/cases_random.py compares."""

import pytest

from kerasdist import config


def test_another_word_is_refused():
    with pytest.raises(ValueError, match=r"'replica' or 'global'\. Received: draws='all'"):
        config.set_draws("all")
    assert config.draws() == "replica"
