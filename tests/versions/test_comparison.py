"""docs/guides/keras-on-torch.md has what its script prints."""

import re

import pytest

from tests.fresh import ROOT
from tests.versions.comparison import CASES, SCRIPT, TOOLS, run

PAGE = ROOT / "docs" / "guides" / "keras-on-torch.md"
MEASURED = ("speed", "killed")  # seconds, which the page says of one run


def cells():
    """What the page shows, by case and tool."""
    text = PAGE.read_text("utf-8")
    rows = re.findall(r"^\| `(\w+)` \|.*?\| (.*?) \| (.*?) \| (.*?) \|$", text, re.M)
    return {
        (case, tool): cell for case, *each in rows for tool, cell in zip(TOOLS, each, strict=True)
    }


def test_the_page_has_every_case_and_the_script():
    assert {case for case, _ in cells()} == set(CASES)
    assert f'--8<-- "{SCRIPT.relative_to(ROOT)}"' in PAGE.read_text("utf-8")


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("case", [one for one in CASES if one not in MEASURED])
def test_it_prints_what_the_page_shows(case, tool):
    found = run(tool, case)
    print(case, tool, found)
    assert re.sub(r" after \d+ s$", "", found) == cells()[case, tool]
