"""docs/versions.md is what `make versions` has written; the package knows its versions."""

from kerasdist.core.backend_choice import TESTED
from tests.conformance import registry
from tests.fresh import run_forked
from tests.multiprocess import layouts
from tests.versions.__main__ import PAGE, page, rows
from tests.versions.selection import QUICK, SUITES


def test_the_page_is_as_it_was_written():
    assert rows()
    assert PAGE.read_text("utf-8") == page(rows())


def test_the_package_knows_the_versions_that_passed():
    found = {name: set() for name in TESTED}
    for row in rows():
        if row.is_good and row.set != "nightly":
            found["keras"].add(row.keras)
            found[row.backend].add(row.framework.partition("+")[0])
    assert found == {name: set(versions) for name, versions in TESTED.items()}


def test_each_case_of_the_selection_is_there():
    facade = registry.load("tests.facade")
    known = {"conformance": registry.load(), "facade": facade}
    known |= dict.fromkeys(("workers", "sharded"), layouts.cases())
    for suites in (SUITES, QUICK):
        for suite, names in suites.items():
            assert [name for name in names if name not in known[suite]] == []


SCRIPT = """
import logging, sys
from kerasdist.core import backend_choice
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
import kerasdist as kd
from kerasdist.api import strategy
kd.OneDeviceStrategy("cpu:0")
print("others:", flush=True)
backend_choice.TESTED = dict.fromkeys(backend_choice.TESTED, ("0.1",))
strategy._log_untested_versions.cache_clear()
for _ in range(2):
    kd.OneDeviceStrategy("cpu:0")
"""


def test_another_version_is_one_line_and_no_refusal():
    tested, _, others = run_forked(SCRIPT, "torch").partition("others:")
    assert "Not among" not in tested
    [line] = [line for line in others.splitlines() if line.startswith("Not among the releases")]
    assert "keras " in line
    assert "torch " in line
