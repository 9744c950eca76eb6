"""``kerasdist info``: what is detected, and why, without importing Keras or a framework."""

import json

import pytest

from kerasdist.cli.diagnostics import info
from tests.fresh import run_fresh
from tests.unit.cluster import environments as env
from tests.unit.printed import printed


def verdicts(environ):
    return {each.name: each.verdict for each in info.gather(environ).sources}


def shown(environ):
    return printed(info.show, info.gather(environ))


def test_nothing():
    facts = info.gather({})
    assert facts.membership is None
    assert facts.error is None
    assert set(verdicts({}).values()) == {"absent"}
    assert "a job of its own" in shown({})


def test_who_is_believed_and_why():
    environ = {**env.SLURM_STEP, **env.TORCHRUN}
    assert {name: each for name, each in verdicts(environ).items() if each != "absent"} == {
        "torchrun": "believed",
        "Slurm": "outer",
    }
    text = shown(environ)
    assert "Worker 5 of 8, number 1 on this machine, told by torchrun" in text
    assert "SLURM_STEP_NODELIST=gpu[008-010],login7" in text
    assert "rank 3 of 7" in text
    assert verdicts({**env.OWN, **env.TF_CONFIG})["TF_CONFIG"] == "agrees"


def test_brackets_are_no_markup():
    environ = {"KERASDIST_WORKERS": "[fe80::1]:4000,[fe80::2]:4000", "KERASDIST_RANK": "1"}
    text = shown(environ)
    assert "rank 0 is at [fe80::1]:5000" in text
    assert "KERASDIST_WORKERS=[fe80::1]:4000,[fe80::2]:4000" in text


@pytest.mark.parametrize(
    ("environ", "verdict"),
    [
        ({**env.TF_CONFIG, **env.TORCHRUN}, "contradicts"),
        ({"TF_CONFIG": "?"}, "wrong"),
        ({"KERASDIST_RANK": "0", "KERASDIST_WORKERS": "2"}, "believed"),
    ],
)
def test_what_is_wrong_is_shown(environ, verdict):
    facts = info.gather(environ)
    assert facts.membership is None
    assert facts.error
    assert verdict in {each.verdict for each in facts.sources}
    assert facts.error.split()[0] in shown(environ)


def test_the_backend_and_who_says_so(tmp_path):
    facts = info.gather({"KERAS_BACKEND": "jax"})
    assert (facts.backend, facts.backend_problem) == ("jax", None)
    environ = {"KERAS_HOME": str(tmp_path)}
    assert info.gather(environ).backend_reason == "Keras's default"
    (tmp_path / "keras.json").write_text('{"backend": "torch"}')
    assert info.gather(environ).backend == "torch"
    assert str(tmp_path) in info.gather(environ).backend_reason
    (tmp_path / "keras.json").write_text("[broken")
    assert info.gather(environ).backend == "tensorflow"


@pytest.mark.parametrize(
    ("backend", "installed", "words"),
    [
        ("pytorch", ["torch"], ["backend='pytorch' (KERAS_BACKEND)", "KERAS_BACKEND=torch"]),
        ("numpy", ["jax"], ["Expected Keras's backend to be one of", "KERAS_BACKEND=jax"]),
        ("jax", ["torch"], ["without the package", "KERAS_BACKEND=torch", "kerasdist[jax]"]),
        ("jax", [], ["Installed here: none of them", "kerasdist[jax]"]),
    ],
)
def test_a_backend_that_cannot_be_used_is_told(monkeypatch, backend, installed, words):
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: name if name in installed else None
    )
    environ = {"KERAS_BACKEND": backend}
    problem = info.gather(environ).backend_problem
    assert problem is not None
    for each in words:
        assert each in problem
    assert problem in " ".join(shown(environ).split())


def test_for_programs_and_without_a_framework():
    code = """
import sys
from kerasdist.cli.app import app
app(["info", "--json"], standalone_mode=False)
print("---")
print(*({name.partition(".")[0] for name in sys.modules}
        & {"keras", "tensorflow", "jax", "torch", "numpy"}))
"""
    facts, _, imported = run_fresh(code, **env.OWN).partition("---")
    assert imported.split() == []
    facts = json.loads(facts)
    assert facts["membership"]["rank"] == 1
    assert facts["sources"][0]["verdict"] == "believed"
    assert facts["versions"]["keras"]
