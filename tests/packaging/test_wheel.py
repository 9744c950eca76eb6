"""What the wheel has in it; ``make wheels`` installs and runs it."""

import zipfile
from email.parser import Parser

import pytest

from tests.fresh import ROOT
from tests.packaging import wheels


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    with zipfile.ZipFile(wheels.build(tmp_path_factory.mktemp("wheel"))) as archive:
        yield archive


def described(wheel, name: str) -> str:
    [path] = [one for one in wheel.namelist() if one.endswith(f".dist-info/{name}")]
    return wheel.read(path).decode()


def test_it_has_every_module_and_nothing_else(wheel):
    names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "kerasdist").rglob("*.py")}
    assert modules <= names
    assert "kerasdist/py.typed" in names
    assert {name.partition("/")[0] for name in names} == {"kerasdist", "kerasdist_ray"}


def test_it_tells_pip_what_it_needs(wheel):
    told = Parser().parsestr(described(wheel, "METADATA"))
    assert told["Requires-Python"] == ">=3.11"
    assert {"tensorflow", "jax", "torch"} <= set(told.get_all("Provides-Extra") or ())
    needed = [one for one in told.get_all("Requires-Dist") or () if "extra ==" not in one]
    assert not [one for one in needed if one.startswith(("tensorflow", "jax", "torch"))]
    assert "kerasdist = kerasdist.launch.app:main" in described(wheel, "entry_points.txt")


def test_readmes_snippet_is_found():
    assert "MirroredStrategy" in wheels.snippet()
    compile(wheels.snippet(), "README.md", "exec")
