"""Who prints before a job is joined: the environment says which worker this is."""

import pytest

from kerasdist.api import scopes


@pytest.fixture(autouse=True)
def _forgotten():
    scopes._is_chief_by_environment.cache_clear()
    yield
    scopes._is_chief_by_environment.cache_clear()


JOB = {"WORKERS": "2", "COORDINATOR": "localhost:2222"}


@pytest.mark.parametrize(
    ("environment", "printed"),
    [
        ({"RANK": "0", **JOB}, "a-b!"),
        ({"RANK": "1", **JOB}, ""),
        ({"RANK": "1"}, "a-b!"),  # which a strategy will refuse
        ({}, "a-b!"),
    ],
)
def test_the_environment_counts(monkeypatch, capsys, environment, printed):
    for name, value in environment.items():
        monkeypatch.setenv(f"KERASDIST_{name}", value)
    scopes.print("a", "b", sep="-", end="!")
    assert capsys.readouterr().out == printed
