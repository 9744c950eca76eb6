"""`kd.config`, whose numbers tests/conformance compares: `cases_random.py`, `cases_passes.py`."""

import types

import pytest

from kerasdist import config
from kerasdist.backends import registry


def test_another_word_is_refused():
    with pytest.raises(ValueError, match=r"'replica' or 'global'\. Received: draws='all'"):
        config.set_draws("all")
    assert config.draws() == "replica"


def test_how_many_examples_at_once(monkeypatch):
    monkeypatch.setattr(registry, "current", lambda: types.SimpleNamespace(name="torch"))
    monkeypatch.setattr(config, "_most_at_once", None)
    config.set_most_examples_at_once(3)
    assert config.most_examples_at_once() == 3
    config.set_most_examples_at_once(None)
    assert config.most_examples_at_once() is None


def test_less_than_one_example_is_refused():
    with pytest.raises(ValueError, match=r"positive number of examples\. Received: count=0"):
        config.set_most_examples_at_once(0)
    with pytest.raises(TypeError):
        config.set_most_examples_at_once(1.5)
