"""Each heading of docs/errors.md is a message of the package; `…` stands for what varies."""

import ast
import re

import pytest

from tests.fresh import ROOT
from tests.unit.test_layers import FILES, parse

HEADINGS = re.findall(r"^### `(.+)`$", (ROOT / "docs/errors.md").read_text("utf-8"), re.MULTILINE)


def template(node: ast.expr) -> str:
    """The text of a string in the code, with `…` for each of its expressions."""
    parts = node.values if isinstance(node, ast.JoinedStr) else [node]
    return "".join(part.value if isinstance(part, ast.Constant) else "…" for part in parts)


@pytest.fixture(scope="module")
def messages():
    return [
        template(node)
        for path in FILES
        for node in ast.walk(parse(path))
        if isinstance(node, ast.JoinedStr)
        or (isinstance(node, ast.Constant) and isinstance(node.value, str))
    ]


def test_there_are_messages_to_look_up():
    assert len(HEADINGS) > 40
    assert len(set(HEADINGS)) == len(HEADINGS)


@pytest.mark.parametrize("heading", HEADINGS)
def test_the_code_has_the_message(heading, messages):
    found = re.compile(".+".join(map(re.escape, heading.strip("…").split("…"))))
    assert any(map(found.search, messages)), "reworded? Then write the new message here"
