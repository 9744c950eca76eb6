"""Who causes a failure with Keras's nightly, which nightly is taken, and what is reported."""

import warnings

import pytest

from tests.environment import fail_on_deprecations
from tests.versions import nightly
from tests.versions.nightly import Nightly, NotInstalledError

LAST = "3.16.0.dev2026100104"
TODAY = Nightly("3.16.0.dev2026102704", nightly.FOLDER, "the newest")
LOST = "keras 3.16 has no keras:Layer._gone. Needed for masks."


@pytest.fixture(autouse=True)
def files(monkeypatch, tmp_path):
    monkeypatch.setattr(nightly, "PIN", tmp_path / "pin.txt")
    monkeypatch.setattr(nightly, "REPORT", tmp_path / "build" / "nightly.md")
    monkeypatch.setattr(nightly, "ROOT", tmp_path)
    nightly.PIN.write_text(f"# why\n{nightly.PACKAGE}=={LAST}\n", "utf-8")


class Selection:
    """Stands in for the runs: what fails, by version, each time that it runs."""

    def __init__(self, **failing):
        self._failing = {version: list(each) for version, each in failing.items()}
        self.asked = []

    def __call__(self, one, backend, only=()):
        self.asked.append((one.version, [*only]))
        each = self._failing["last" if one.version == LAST else "today"]
        return dict.fromkeys(each.pop(0), "ValueError: x")


def installed(version=None):
    return Nightly(version or TODAY.version, nightly.FOLDER)


def nothing_there(version=None):
    raise NotInstalledError(f"no {version or 'version'}")


def judged(selection, today=TODAY, installed=installed):
    return nightly.judged("torch", today, selection, installed, lambda *_: [LOST])


def test_what_passes_needs_no_other_nightly():
    selection = Selection(today=[[]])
    found = judged(selection)
    assert (found.failed, found.ours, found.line.endswith(": passed")) == ({}, "", True)
    assert len(selection.asked) == 1


FAILS = ["conformance optimizers.adam-x2", "tripwires"]


def test_where_the_last_one_passes_keras_has_changed():
    selection = Selection(today=[FAILS, FAILS], last=[[]])
    found = judged(selection)
    assert not found.ours
    assert {
        version for version, only in selection.asked[1:] if only == ["conformance", "tripwires"]
    } == {LAST, TODAY.version}
    for said in (TODAY.version, LAST, "Keras has changed", "make nightly", "build/nightly.md"):
        assert said in found.line
    for said in (*FAILS, "ValueError: x", LOST):
        assert said in found.text


@pytest.mark.parametrize(
    ("selection", "today", "why"),
    [
        (
            Selection(today=[FAILS], last=[["tripwires"]]),
            TODAY,
            "So it does with 3.16.0.dev2026100104",
        ),
        (Selection(today=[FAILS, []], last=[[]]), TODAY, "by chance"),
        (Selection(last=[FAILS]), Nightly(LAST, nightly.FOLDER), "kerasdist has changed"),
        (
            Selection(today=[FAILS, FAILS], last=[[]]),
            Nightly("3.17.0.dev2026110104", nightly.FOLDER),
            "more than 30 days older",
        ),
    ],
    ids=["both fail", "by chance", "the same nightly", "for a month"],
)
def test_it_is_ours(selection, today, why):
    found = judged(selection, today)
    assert why in found.ours
    assert "FAILED" in found.line
    assert why in found.text


def test_without_one_to_compare_with_it_is_ours():
    found = judged(Selection(today=[FAILS]), installed=nothing_there)
    assert "is not to be had" in found.ours


def test_the_newest_is_taken_and_where_there_is_none_the_last_that_passed():
    assert nightly.of_today(installed).version == TODAY.version
    assert "of 2026-10-27" in nightly.of_today(installed).note

    def only_the_last(version=None):
        return installed(version) if version else nothing_there()

    found = nightly.of_today(only_the_last)
    assert found.version == LAST
    assert "has none today (no version)" in found.note
    with pytest.raises(NotInstalledError):
        nightly.of_today(nothing_there)


def test_the_pin_moves_and_keeps_what_is_said_of_it():
    nightly.move_pin(TODAY.version)
    assert nightly.pinned() == TODAY.version
    assert nightly.PIN.read_text("utf-8").startswith("# why\n")


def test_the_report_has_each_backend():
    nightly.write(
        [nightly.Finding("jax", TODAY), judged(Selection(today=[FAILS, FAILS], last=[[]]))]
    )
    text = nightly.REPORT.read_text("utf-8")
    assert "## jax\n\njax, keras-nightly 3.16.0.dev2026102704" in text
    assert "## torch" in text


def test_each_failure_belongs_to_a_part():
    for backend in nightly.BACKENDS:
        names = nightly.parts(backend)
        assert ("sharded" in names) == (backend != "tensorflow")
        assert [nightly.part_of(f"{name} x", backend) for name in names] == [*names]


@pytest.mark.parametrize("kind", [DeprecationWarning, PendingDeprecationWarning, FutureWarning])
def test_a_deprecation_is_an_error_in_kerasdists_own_lines(kind):
    line = compile(
        f"import warnings\nwarnings.warn('from 4.0 on', {kind.__name__})", "x.py", "exec"
    )
    with warnings.catch_warnings(action="ignore"):
        fail_on_deprecations()
        for module in ("kerasdist", "kerasdist.training.trainer"):
            with pytest.raises(kind):
                exec(line, {"__name__": module})
        for module in ("keras.src.trainers", "kerasdist_ray", "tests.conformance.worker"):
            exec(line, {"__name__": module})
