"""What the wheel has in it; ``make wheels`` installs and runs it."""

import zipfile

from tests.fresh import ROOT
from tests.packaging import wheels


def test_it_has_every_module_and_nothing_else(tmp_path):
    with zipfile.ZipFile(wheels.build(tmp_path)) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "kerasdist").rglob("*.py")}
    assert modules <= names
    assert "kerasdist/py.typed" in names
    assert {name.partition("/")[0] for name in names} == {"kerasdist", "kerasdist_ray"}
