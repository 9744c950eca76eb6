"""Below the lowest versions making a strategy is one line that says so; nothing fails before."""

import re
import sys

import pytest

from tests.fresh import run_fresh
from tests.versions.__main__ import floors
from tests.versions.selection import BACKENDS

# What is older stands first on the path, by its name and version alone.
SCRIPT = """
import sys
import kerasdist as kd

before = {*sys.modules}
try:
    kd.MirroredStrategy(["cpu:0"])
except kd.errors.VersionError as error:
    print(error)
assert not {"keras", "tensorflow", "jax", "torch"} & ({*sys.modules} - before), "it goes first"
"""


@pytest.mark.parametrize(
    ("backend", "package", "distribution", "version"),
    [
        ("jax", "keras", "keras", "3.11.3"),
        ("torch", "keras", "keras_nightly", "3.11.0.dev2025072504"),
        ("jax", "jax", "jax", "0.7.2"),
        ("tensorflow", "tensorflow", "tensorflow", "2.17.1"),
        ("torch", "torch", "torch", "2.8.0+cpu"),
    ],
)
def test_it_names_the_version_the_lowest_and_the_command(
    backend, package, distribution, version, tmp_path, monkeypatch
):
    information = tmp_path / f"{distribution}-{version}.dist-info"
    information.mkdir()
    text = f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n"
    (information / "METADATA").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    path = ":".join(sys.path)
    lines = run_fresh(SCRIPT, KERAS_BACKEND=backend, PYTHONPATH=path).splitlines()
    floor = floors()[package]
    assert len(lines) == 1
    assert lines[0].startswith(f"Expected {package}>={floor}, the lowest version that kerasdist")
    assert f"Received: {package}={version}. Install it: pip " in lines[0]
    assert re.search(rf"'{package}>={floor}'\.$", lines[0])
    assert ("pip uninstall --yes" in lines[0]) == ("nightly" in distribution)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_imported_counts_more_than_what_is_installed(backend):
    """As where another folder has been put before the installed packages since."""
    code = f"import {backend}; {backend}.__version__ = '0.1'\n{SCRIPT}"
    assert f"Received: {backend}=0.1" in run_fresh(code, KERAS_BACKEND=backend)
