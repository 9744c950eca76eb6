"""The page of the behaviours is what its cases say."""

from tests.facade.behaviours import page


def test_page_is_that_of_the_cases():
    said = "run python -m tests.facade.behaviours"
    assert page.PAGE.read_text(encoding="utf-8") == page.written(), said


def test_no_behaviour_goes_unnoticed():
    assert page.count() >= 150
