"""Each contract, each repair and each claim has a test; a claim stands on its page."""

import pytest

from tests.fresh import ROOT
from tests.promises import PROMISES, held_by, promises

CLAIMS = PROMISES["claim"]


@pytest.mark.parametrize("promise", [*promises()], ids=lambda one: f"{one[0]}: {one[1]}")
def test_a_promise_has_a_test(promise):
    assert promise[2], "name the test in claims.toml"


@pytest.mark.parametrize(
    "one", PROMISES["contract"] + PROMISES["repaired"], ids=lambda one: one["says"]
)
def test_each_test_that_is_named_is_there(one):
    assert [test for test in one["tests"] if not [*held_by(test)]] == []


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim["test"])
def test_a_claim_stands_on_its_page(claim):
    page = " ".join((ROOT / claim["page"]).read_text(encoding="utf-8").split())
    assert claim["says"] in page


def test_no_claim_is_made_twice():
    assert len({(claim["page"], claim["says"]) for claim in CLAIMS}) == len(CLAIMS)
