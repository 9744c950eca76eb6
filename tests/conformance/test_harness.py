"""The exactness suite can fail: what is wrong, hangs or crashes is told as such."""

import re

import numpy as np
import pytest

from tests.conformance import compare, registry, runner, support

# Before a test swaps the catalogue: modules are read, and their cases registered, but once.
registry.load()

WANTED = {
    "good": "passed",
    "wrong": "failed",
    "hangs": "timeout",
    "crashes": "died",
    "after": "passed",
    "refused": "refused",
    "refused_otherwise": "error",
}


def test_misbehaving_cases_are_told(monkeypatch, tmp_path):
    monkeypatch.setenv(registry.EXTRA_CASES, "tests.conformance.probes")
    monkeypatch.setattr(registry, "CASES", dict(registry.CASES))
    monkeypatch.setattr(runner, "RESULTS", tmp_path)
    # In the order of WANTED: a case runs after the one that hangs, and after the one that crashes.
    run = runner.BackendRun("torch", [f"tests.conformance.probes.{name}-x2" for name in WANTED])
    results = {result.key.split(".")[-1].removesuffix("-x2"): result for result in run.results()}
    assert {name: result.status for name, result in results.items()} == WANTED
    assert "2.1" in results["wrong"].message
    assert "hangs" in results["hangs"].traceback
    assert "exit code 7" in results["crashes"].message
    assert not run.result("unknown").good


def test_every_case_has_a_title_and_replicas():
    for case in registry.load().values():
        assert case.title
        assert case.replicas
        assert set(case.backends) <= set(registry.BACKENDS)


@pytest.mark.parametrize("suite", [registry.CONFORMANCE, "tests.facade"])
def test_what_is_like_another_case_names_one_that_runs(suite):
    cases = registry.load(suite)
    for case in filter(lambda case: case.like, cases.values()):
        other = cases[case.like]
        assert not other.like
        assert set(case.backends) <= set(other.backends)


def test_the_suite_covers_each_number_of_replicas_on_each_backend():
    for backend in registry.BACKENDS:
        counts = [item.replicas for item in registry.items(backend)]
        assert all(counts.count(replicas) > 40 for replicas in registry.REPLICAS)


def skeleton(page):
    return re.sub(r"yes, \de-\d\d", "yes", page.partition("## Tolerances")[0])


def test_the_support_page_is_the_generators():
    """`make support` gives this page, but for figures; nothing in it is by hand."""
    results = [
        runner.Result(item.key, backend, "refused" if backend in item.case.refused else "passed")
        for backend in registry.BACKENDS
        for item in registry.items(backend)
    ]
    page = support.PAGE.read_text(encoding="utf-8")
    assert skeleton(page).splitlines() == skeleton(support.page(results)).splitlines()


def test_what_workers_have_is_a_case_of_theirs():
    there = registry.load("tests.multiprocess")
    for name, other in support.ON_WORKERS.items():
        assert "torch" in registry.load()[name].refused
        assert "torch" in there[other].backends


@pytest.mark.parametrize(
    ("expected", "actual"),
    [
        (1.0, 1.0001),
        (np.nan, 1.0),
        (1.0, np.nan),
        (np.inf, 1.0),
        (1.0, np.inf),
        (np.inf, -np.inf),
        ([1.0], [1.0, 2.0]),
        ({"a": 1.0}, {"b": 1.0}),
        (np.zeros(3, "float32"), np.zeros((3, 1), "float32")),
        (np.zeros(3, "float32"), np.zeros(3, "float64")),
        ("one", "two"),
        (None, 1.0),
    ],
)
def test_unequal(expected, actual):
    with pytest.raises(AssertionError):
        compare.largest_difference(expected, actual, compare.FLOAT32)


@pytest.mark.parametrize(
    "value", [1.0, np.nan, np.inf, [1.0, {"a": np.arange(3)}], None, "text", np.zeros((0, 4))]
)
def test_equal(value):
    assert compare.largest_difference(value, value, compare.FLOAT32) == 0.0


def test_the_largest_difference_is_told():
    found = compare.largest_difference([1.0, 2.0], [1.0, 2.000001], compare.FLOAT32)
    assert found == pytest.approx(1e-6, rel=1e-3)
