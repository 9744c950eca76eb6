"""`Internal`: where something private is, by version; a `VersionError` as what is gone is used."""

import functools
import sys
from types import ModuleType

import pytest

from kerasdist.core.internals import EVERY_VERSION, Internal, internals_of
from kerasdist.errors import VersionError


def decorated(function):
    @functools.wraps(function)
    def call(*args):
        return function(*args)

    return call


class Parent:
    @property
    def outputs(self):
        self._of_a_property = 1
        return self._of_a_property

    @decorated
    def call(self):
        self._of_a_wrapped_method = 1

    def trace(self):
        def step():
            self._of_a_nested_function = 1

        step()


class Model(Parent):
    _kind = "dense"

    def __init__(self):
        self._weights = [1.0]

    @property
    def _layers(self):
        return []

    @staticmethod
    def open_scope():
        return "stateless_scope"

    @classmethod
    def make(cls):
        cls._made = cls()


MADE = ("_weights", "_made", "_of_a_property", "_of_a_wrapped_method", "_of_a_nested_function")


@pytest.fixture(autouse=True)
def jax_of_this_test(monkeypatch):
    """A package that is called JAX: its modules are these."""
    package, steps = ModuleType("jax"), ModuleType("jax.steps")
    package.__version__, package.__path__ = "0.99", []
    package.Model, package.steps = Model, steps
    steps.take_step = lambda: "a step"
    monkeypatch.setitem(sys.modules, "jax", package)
    monkeypatch.setitem(sys.modules, "jax.steps", steps)
    return package


def internal(*spellings, **options):
    versions = [*(f"0.{9 - number}" for number in range(len(spellings) - 1)), EVERY_VERSION]
    pairs = dict(zip(spellings, versions, strict=True))
    return Internal(pairs, "training on mars", without="refused", **options)


def test_what_a_module_or_class_has_is_found():
    assert internal("jax.steps:take_step").value() == "a step"
    assert internal("jax:Model._layers").value is Model._layers
    assert internal("jax:Model._layers").place == (Model, "_layers")
    assert internal("jax:steps").value is sys.modules["jax.steps"]
    assert internal("jax:Model._kind").package == "jax"
    assert internal("jax:Model._kind").attribute == "_kind"


@pytest.mark.parametrize("name", MADE)
def test_attributes_that_objects_get_are_known_by_the_class(name):
    assert internal(f"jax:Model.{name}").is_there()


@pytest.mark.parametrize(
    "path",
    [
        "jax:Model._weight",
        "jax:Layer._weights",
        "jax:steps._weights",
        "jax.steps:run_step",
        "jax.loops:take_step",
    ],
)
def test_what_is_gone_is_an_error_as_it_is_used(path):
    gone = internal(path)
    assert not gone.is_there()
    for use in (lambda: gone.value, lambda: gone.place, gone.require):
        with pytest.raises(VersionError) as raised:
            use()
        for said in (path, "training on mars", "jax=0.99", "pip install jax==", "kerasdist doctor"):
            assert said in str(raised.value)


def test_it_is_looked_for_when_it_is_used(jax_of_this_test):
    late = internal("jax:late")
    jax_of_this_test.late = 1
    assert late.value == 1


def test_of_two_spellings_the_one_that_is_there_counts():
    both = internal("jax:Model._kinds", "jax:Model._kind")
    assert (both.value, both.of(Model()), both.attribute) == ("dense", "dense", "_kind")
    newest = internal("jax:Model._kind", "jax:Model._weights")
    assert (newest.value, newest.attribute) == ("dense", "_kind")
    neither = internal("jax:Model._kinds", "jax:Model._sorts")
    assert neither.attribute == "_kinds"
    with pytest.raises(VersionError, match=r"jax:Model\._kinds"):
        _ = neither.value


def test_objects_have_their_own():
    weights, model = internal("jax:Model._weight", "jax:Model._weights"), Model()
    weights.set(model, [2.0])
    assert (weights.of(model), model._weights, hasattr(model, "_weight")) == ([2.0], [2.0], False)


def test_an_object_is_asked_where_its_class_cannot_tell():
    """What is set from outside."""
    model, mask = Model(), internal("jax:Model._mask")
    model._mask = 1
    assert not mask.is_there()
    mask.set(model, 2)
    assert (mask.of(model), model._mask) == (2, 2)


def test_something_else_serves_where_it_is_gone():
    assert internal("jax.steps:take_step", otherwise=None).value() == "a step"
    gone = internal("jax.steps:run_step", otherwise=None)
    assert (gone.value, gone.is_there()) == (None, False)
    with pytest.raises(VersionError):
        gone.require()


def test_a_text_in_a_function_is_its_own_value():
    assert internal("jax:Model.open_scope.stateless_scope").value == "stateless_scope"


def test_an_object_that_has_none_gets_none():
    model, gone = Model(), internal("jax:Model._weight")
    with pytest.raises(VersionError, match=r"jax:Model\._weight"):
        gone.of(model)
    with pytest.raises(VersionError, match=r"jax:Model\._weight"):
        gone.set(model, 1)
    assert not hasattr(model, "_weight")


def test_none_is_a_value():
    model = Model()
    model._weights = None
    weights = internal("jax:Model._weights")
    assert weights.of(model) is None
    weights.set(model, [1.0])
    assert model._weights == [1.0]


def test_a_table_is_a_module():
    table = ModuleType("table")
    table.FIRST, table.text, table.SECOND = internal("jax:a"), "text", internal("jax:b")
    assert internals_of(table) == {"FIRST": table.FIRST, "SECOND": table.SECOND}
