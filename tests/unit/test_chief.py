"""Who prints before a job is joined: the environment says which worker this is."""

import pytest

from kerasdist.api import scopes
from kerasdist.api.strategy import Strategy


@pytest.fixture(autouse=True)
def _forgotten():
    scopes._is_chief_by_environment.cache_clear()
    yield
    scopes._is_chief_by_environment.cache_clear()


@pytest.mark.parametrize(("rank", "printed"), [("0", "a-b!"), ("1", "")])
def test_the_environment_counts(monkeypatch, capsys, rank, printed):
    for name, value in {"RANK": rank, "WORKERS": "2", "COORDINATOR": "localhost:2222"}.items():
        monkeypatch.setenv(f"KERASDIST_{name}", value)
    scopes.print("a", "b", sep="-", end="!")
    assert capsys.readouterr().out == printed


def test_alone(capsys):
    scopes.print("a", 1)
    assert capsys.readouterr().out == "a 1\n"


def test_an_environment_that_a_strategy_will_refuse(monkeypatch, capsys):
    monkeypatch.setenv("KERASDIST_RANK", "1")
    scopes.print("a")
    assert capsys.readouterr().out == "a\n"


def test_a_strategy_of_one_process():
    strategy = Strategy(None)
    assert strategy.is_chief
    with strategy.chief_first():
        pass
