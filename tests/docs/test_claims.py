"""Each claim of `claims.toml` stands on its page, and the test that shows it is there."""

import re
import tomllib
from pathlib import Path

import pytest

from tests.fresh import ROOT

FILE = Path(__file__).with_name("claims.toml")
CLAIMS = tomllib.loads(FILE.read_text(encoding="utf-8"))["claim"]


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim["test"])
def test_a_claim_stands_on_its_page_and_is_tested(claim):
    page = " ".join((ROOT / claim["page"]).read_text(encoding="utf-8").split())
    assert claim["says"] in page
    file, _, name = claim["test"].partition(":")
    tests = (ROOT / file).read_text(encoding="utf-8")
    assert re.search(rf'^ *def {name}\(|"{name}"', tests, re.MULTILINE)


def test_no_claim_is_made_twice():
    assert len({(claim["page"], claim["says"]) for claim in CLAIMS}) == len(CLAIMS)
