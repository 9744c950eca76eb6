"""The site builds without a warning, and its pages ask no other server for anything."""

import re

import pytest

from examples.gallery import GALLERY
from tests.docs.blocks import blocks_of, pages
from tests.fresh import ROOT, run_python

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    # --strict: a link to a page or heading that does not exist, or a name without a docstring.
    command = ("-m", "mkdocs", "build", "--strict", "--site-dir", folder)
    run_python(*command, NO_MKDOCS_2_WARNING="1")
    return folder


_ASKS = re.compile(
    r'<(?:script|img|iframe|source)[^>]* src="?((?:https?:)?//[^"> ]+)'
    r'|<link[^>]* rel="?(?:stylesheet|preconnect|preload)"?[^>]* href="?((?:https?:)?//[^"> ]+)'
)


def test_nothing_comes_from_another_server(site):
    asked = {page: _ASKS.findall(page.read_text("utf-8")) for page in site.rglob("*.html")}
    assert [addresses for addresses in asked.values() if addresses] == []
    for script in ("formulas.js", "assets/katex/katex.min.css"):
        assert "url(http" not in (site / script).read_text("utf-8")
        assert "https://" not in (site / script).read_text("utf-8")


def test_formulas_are_drawn_by_files_of_the_site(site):
    page = (site / "numerics/index.html").read_text("utf-8")
    assert page.count('class="arithmatex"') > 20
    assert "formulas.js" in page
    katex = site / "assets/katex"
    assert (katex / "katex.min.js").stat().st_size > 100_000
    fonts = set(re.findall(r"url\((fonts/[^)]+)\)", (katex / "katex.min.css").read_text("utf-8")))
    assert fonts
    assert all((katex / font).is_file() for font in fonts)


def test_code_on_the_home_page_fits_its_column():
    """At 1,300 pixels the column has room for 80 characters."""
    blocks = list(blocks_of("docs/index.md"))
    assert blocks
    assert {line for block in blocks for line in block.text.splitlines() if len(line) > 80} == set()


def test_cards_of_the_gallery_are_cards(site):
    """With `md_in_html`, what stands in a card is Markdown; without it the marks are seen."""
    page = (site / "gallery/index.html").read_text("utf-8")
    cards = page.partition('class="grid cards"')[2]
    assert cards.count("<img ") == len(GALLERY)
    assert "](" not in cards


def test_internals_are_not_in_the_reference(site):
    strategies = (site / "reference/strategies/index.html").read_text("utf-8")
    assert "num_replicas_in_sync" in strategies
    for name in ("replica_set", "runner", "local_replicas", "sole_replica_context"):
        assert f".{name}" not in strategies


@pytest.mark.parametrize("page", [page for page in pages() if not page.startswith("docs/")])
def test_links_of_pages_beside_the_site_lead_somewhere(page):
    text = re.sub(r"```.*?```", "", (ROOT / page).read_text("utf-8"), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, heading = link.partition("#")
        if path.startswith(("http://", "https://")) or not path:
            continue
        target = (ROOT / page).parent / path
        assert target.exists(), link
        if heading:
            headings = re.findall(r"^#+ (.+)$", target.read_text("utf-8"), re.MULTILINE)
            slugs = {re.sub(r"[^\w\s-]", "", one).strip().lower() for one in headings}
            assert heading in {re.sub(r"[-\s]+", "-", one) for one in slugs}, link
