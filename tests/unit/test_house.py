"""What `make house` counts is counted right, and no modules import each other in a circle."""

import ast

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
    assert house.lines(path) == len(SOURCE.splitlines())


def test_members_are_public_and_abstract_or_not():
    [owner] = [node for node in ast.parse(SOURCE).body if isinstance(node, ast.ClassDef)]
    assert dict(house.members(owner)) == {"wanted": True, "given": False}


def test_the_waist_is_found():
    known = house.waist()
    assert known["Backend.replica_set"]
    assert house.implemented_by("Backend.replica_set") == list(house.FRAMEWORKS)


def test_no_modules_import_each_other():
    assert house.circles() == []
