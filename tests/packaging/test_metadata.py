"""What the package promises to an installer."""

import re
import tomllib
from importlib import metadata

import pytest

import kerasdist
from tests.fresh import ROOT

FRAMEWORKS = {"tensorflow", "tensorflow-cpu", "jax", "jaxlib", "torch"}


@pytest.fixture(scope="module")
def project():
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def name_of(requirement: str) -> str:
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert found, requirement
    return found[0].lower()


def lines_of(file: str) -> list[str]:
    lines = (ROOT / "requirements" / file).read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def test_no_framework_is_a_hard_requirement(project):
    assert project["requires-python"] == ">=3.11"
    assert not {name_of(requirement) for requirement in project["dependencies"]} & FRAMEWORKS


def test_the_oldest_keras_of_the_tests_is_the_declared_one(project):
    [declared] = [each for each in project["dependencies"] if name_of(each) == "keras"]
    assert lines_of("oldest-keras.txt")[-1] == declared.replace(">=", "==") + ".0"


def test_each_framework_has_an_extra_and_all_has_each(project):
    extras = project["optional-dependencies"]
    for framework in ("tensorflow", "jax", "torch"):
        assert framework in {name_of(each) for each in extras[framework]}
    assert extras["all"] == ["kerasdist[tensorflow,jax,torch]"]


def test_the_command_is_there(project):
    [(name, value)] = project["scripts"].items()
    assert name == "kerasdist"
    assert callable(metadata.EntryPoint(name, value, "console_scripts").load())


def test_one_version_which_the_changelog_has(project):
    assert project["version"] == kerasdist.__version__
    assert f"## [{project['version']}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_installed_metadata_equals_the_project(project):
    """Fails when .venv is older than pyproject.toml (`make venv` cures it)."""
    installed = metadata.metadata("kerasdist")
    assert installed["Version"] == project["version"]
    assert set(installed.get_all("Provides-Extra") or []) == set(project["optional-dependencies"])


def test_the_lock_names_no_machine_and_no_cuda():
    requirements = lines_of("lock.txt")
    assert not [line for line in requirements if re.search(r"[/@+:]", line)]
    cuda = [line for line in requirements if re.search(r"nvidia|cuda|triton", line, re.I)]
    assert [line.partition("==")[0] for line in cuda] == ["nvidia-ml-py"]  # pure Python


def test_the_lock_holds_every_direct_pin():
    pins = [line.lower().replace("_", "-") for line in lines_of("lock.txt")]
    assert [pin for pin in lines_of("lock.in") if re.sub(r"\[.*\]", "", pin) not in pins] == []
