"""The guide for contributors: its drawing is that of the imports, and the files it names exist."""

import re

import pytest

from tests.docs.layers_picture import PICTURE, drawing
from tests.fresh import ROOT

TOUR = (ROOT / "docs/how-it-works.md").read_text("utf-8").partition("## Where to look")[0]
FILES = sorted(set(re.findall(r"`([\w/]+\.py)`", TOUR)))


def test_the_drawing_is_that_of_the_imports():
    assert PICTURE.read_text("utf-8") == drawing(), "run python -m tests.docs.layers_picture"


@pytest.mark.parametrize("file", FILES)
def test_a_file_of_the_tour_exists(file):
    """In the package, or in a backend's folder."""
    package = ROOT / "kerasdist"
    assert (package / file).is_file() or list(package.glob(f"backends/*/{file}"))
