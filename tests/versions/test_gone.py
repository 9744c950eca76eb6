"""Each internal is gone in turn: that costs what its declaration says, and nothing else.

In a process in which Keras has it under another name (`tests.versions.renaming`) kerasdist is
imported, a strategy made and a dense model trained, which equals one device, unless every `fit`
needs the internal; and what it is for is used.
"""

import functools

import numpy as np
import pytest

from tests import internals
from tests.internals import BACKENDS, MOST_IN_EACH_FIT, TABLES
from tests.versions.features import FEATURES
from tests.versions.gone import without
from tests.versions.renaming import MOVED

CASES = [
    (f"{package}.{name}", backend)
    for backend in BACKENDS
    for package in ("keras", backend)
    for name, one in internals.table(package).items()
    if backend in (one.backends or BACKENDS)
]


@functools.cache
def one_device(backend: str) -> list[float]:
    """The losses and weights of plain Keras, which two replicas have as well."""
    found = without("keras", [], backend)
    np.testing.assert_allclose(found["fit"], found["plain"], rtol=1e-6)
    return found["plain"]


@pytest.mark.parametrize(("name", "backend"), CASES)
def test_without_it(name, backend):
    package, _, own = name.partition(".")
    internal = internals.table(package)[own]
    found = without(package, [*internal.spellings], backend, name)
    assert found["replicas"] == 2
    place = next(iter(internal.spellings)) + MOVED * (package != "keras")
    if internal.in_each_fit:
        expect_refusal(found["fit"], internal.feature, place)
    trained = found["plain" if internal.in_each_fit else "fit"]
    assert not isinstance(trained, str), trained
    np.testing.assert_allclose(trained, one_device(backend), rtol=1e-6)
    if internal.without.startswith("refused"):
        expect_refusal(found["feature"], internal.feature, place)
    else:
        assert found["feature"] is None, found["feature"]


def expect_refusal(said, feature, place):
    """An error that names both."""
    assert isinstance(said, str), f"there was no error, but {said}"
    assert place in said
    assert feature in said


def test_each_internal_has_a_use():
    declared = {f"{package}.{name}" for package in TABLES for name in internals.table(package)}
    assert set(FEATURES) == declared


@pytest.mark.parametrize("backend", BACKENDS)
def test_few_are_needed_by_each_fit(backend):
    needed = [name for name, one in internals.used_on(backend).items() if one.in_each_fit]
    assert 0 < len(needed) <= MOST_IN_EACH_FIT
