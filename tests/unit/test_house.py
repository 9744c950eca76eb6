"""What `make house` counts is below its ceiling; no circle of imports; all is in docs."""

import posixpath
import re

import pytest

from tests import house

NO_CEILING_IS_RAISED = "delete what does not earn its lines; no ceiling is raised (ADR 48)"


def test_no_modules_import_each_other():
    assert house.circles(types=False) == []


def test_no_figure_is_above_its_ceiling():
    now = house.measured()
    assert now["lines of code"] > 20_000  # the counting works
    assert house.above_ceilings(house.FIGURES, now) == {}, NO_CEILING_IS_RAISED


@pytest.mark.parametrize("backend", house.FIGURES_OF_FIT)
def test_fit_calls_no_more_functions(backend):
    now = house.measured_of_fit(backend)
    assert now["functions of a first fit"] > 50  # the counting works
    assert house.above_ceilings(house.FIGURES_OF_FIT[backend], now) == {}, NO_CEILING_IS_RAISED


HOW = house.PACKAGE.parent / "docs" / "how-it-works.md"


def rooms() -> set[str]:
    """The files and folders that the table of how-it-works.md names, as paths in the package.

    A name is looked for in the folder of the name before it in its row, then in the package.
    """
    found: set[str] = set()
    lines = HOW.read_text("utf-8").partition("## Where to look")[2].splitlines()
    for row in (line for line in lines if line.startswith("|")):
        folder = ""
        for name in re.findall(r"`([\w/<>]+(?:\.py|/))`", row.rpartition(" | ")[2]):
            beside = posixpath.join(folder, name)
            in_one = house.PACKAGE / beside.replace("<framework>", "jax")
            path = beside if in_one.exists() else name
            folder = posixpath.dirname(path)
            found |= {path.replace("<framework>", one) for one in house.FRAMEWORKS}
    return found


def test_the_guide_names_a_room_for_each_module():
    named = rooms()
    assert [name for name in sorted(named) if not (house.PACKAGE / name).exists()] == []
    folders = tuple(name for name in named if name.endswith("/"))
    modules = {str(path.relative_to(house.PACKAGE)) for path in house.FILES}
    known = {name for name in modules if name in named or name.startswith(folders)}
    packages = {name for name in modules if name.startswith("backends/") and "__init__" in name}
    assert sorted(modules - known - packages) == []
