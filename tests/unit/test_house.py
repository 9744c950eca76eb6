"""What `make house` counts is right and below its ceiling; no circle of imports; all is in docs."""

import ast
import posixpath
import re

from tests import house

SOURCE = '''"""A module.

Two paragraphs.
"""

# A comment.
import abc


class Owner(abc.ABC):
    """A class."""

    text = """of
    two lines"""

    @abc.abstractmethod
    def wanted(self):
        """What a backend must have."""

    def given(self):  # with a comment
        return (
            1
        )

    def _own(self): ...
'''


def test_code_is_neither_blank_nor_comment_nor_docstring(tmp_path):
    path = tmp_path / "module.py"
    path.write_text(SOURCE, encoding="utf-8")
    assert house.lines_of_code(path) == 11


def test_members_are_public_and_abstract_or_not():
    [owner] = [node for node in ast.parse(SOURCE).body if isinstance(node, ast.ClassDef)]
    assert dict(house.members(owner)) == {"wanted": True, "given": False}


def test_the_waist_is_found():
    known = house.waist()
    assert known["Backend.replica_set"]
    assert house.implemented_by("Backend.replica_set") == list(house.FRAMEWORKS)


def test_no_modules_import_each_other():
    assert house.circles(types=False) == []


def test_no_figure_is_above_its_ceiling():
    now = house.measured()
    above = {one.name: now[one.name] for one in house.FIGURES if now[one.name] > one.ceiling}
    assert above == {}, "delete what does not earn its lines; no ceiling is raised (ADR 48)"


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
