"""Each internal is gone in turn: that costs what its declaration says, and nothing else.

In a process in which Keras has it under another name (`tests.versions.renaming`) kerasdist is
imported, a strategy made and a dense model trained, which equals one device, unless every `fit`
needs the internal; and what it is for is used. Each process is forked from one that has imported
the framework, so a case costs an import of Keras and what it trains: one to two seconds of a core.
"""

import functools

import numpy as np
import pytest

from tests import internals
from tests.internals import BACKENDS, TABLES
from tests.versions.features import FEATURES
from tests.versions.gone import Gone
from tests.versions.renaming import MOVED

# What this version does not have cannot be removed from it.
CASES = [
    (f"{table}.{name}", backend)
    for backend in BACKENDS
    for table in ("keras", backend)
    for name, one in internals.table(table).items()
    if backend in (one.backends or BACKENDS) and internals.spellings_here(one)
    if backend in FEATURES[f"{table}.{name}"].on
]


@functools.cache
def one_device(backend: str) -> list[float]:
    """The losses and weights of plain Keras, which two replicas have as well."""
    found = Gone("keras", [], backend).found
    np.testing.assert_allclose(found["fit"], found["plain"], rtol=1e-6)
    return found["plain"]


@functools.cache
def gone(name: str, backend: str) -> Gone:
    table, _, own = name.partition(".")
    internal = internals.table(table)[own]
    return Gone(internal.package, internals.spellings_here(internal), backend, name)


@pytest.fixture
def ahead(request):
    """The processes of the next case start when those of this one do: there are two cores."""
    chosen = [one for one in request.session.items if one.function is test_without_it]
    place = chosen.index(request.node)
    for one in chosen[place : place + 2]:
        gone(one.callspec.params["name"], one.callspec.params["backend"])


@pytest.mark.parametrize(("name", "backend"), CASES)
def test_without_it(name, backend, ahead):
    table, _, own = name.partition(".")
    internal = internals.table(table)[own]
    found = gone(name, backend).found
    assert found["replicas"] == 2
    place = next(iter(internal.spellings)) + MOVED * (internal.package != "keras")
    if internal.in_each_fit:
        expect_refusal(found["fit"], internal.feature, place)
    trained = found["plain" if internal.in_each_fit else "fit"]
    assert not isinstance(trained, str), trained
    np.testing.assert_allclose(trained, one_device(backend), rtol=1e-6)
    assert found["feature"]
    for one in found["feature"]:
        if FEATURES[name].is_refused:
            expect_refusal(one, internal.feature, place)
        else:
            assert not isinstance(one, str), one


def expect_refusal(said, feature, place):
    """An error that names both."""
    assert isinstance(said, str), f"there was no error, but {said}"
    assert place in said
    assert feature in said


def test_each_internal_has_a_use():
    declared = {f"{table}.{name}" for table in TABLES for name in internals.table(table)}
    assert declared == FEATURES.keys()


def test_what_is_refused_is_declared_so():
    for name, use in FEATURES.items():
        table, _, own = name.partition(".")
        said = internals.table(table)[own].without
        assert "refused" in said if use.is_refused else said != "refused", name
