"""The list of decisions has each record once, and the superseded ones apart."""

import re

from tests.fresh import ROOT

FOLDER = ROOT / "docs" / "adr"
SECTIONS = re.split(r"^## ", (FOLDER / "README.md").read_text(encoding="utf-8"), flags=re.M)
LISTED = {
    section.partition("\n")[0]: re.findall(r"^\| \[\d{4}\]\((\S+?)\)", section, re.M)
    for section in SECTIONS
}


def test_each_record_is_listed_once():
    names = [name for names in LISTED.values() for name in names]
    assert sorted(names) == sorted(path.name for path in FOLDER.glob("0*.md"))
    assert len(LISTED["Read these five"]) == 5


def test_superseded_records_stand_apart():
    def is_superseded(name):
        text = (FOLDER / name).read_text(encoding="utf-8")
        return re.search(r"^Status: superseded", text, re.M) is not None

    records = [path.name for path in FOLDER.glob("0*.md")]
    assert LISTED["Superseded"] == sorted(filter(is_superseded, records))
