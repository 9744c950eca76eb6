"""What kerasdist holds on to is declared, little, and where the tables say."""

import ast
import json
from dataclasses import replace

import pytest
from packaging.version import Version

from kerasdist.core.backend_choice import framework_version
from tests import internals
from tests.fresh import run_forked
from tests.internals import BACKENDS, MOST_IN_EACH_FIT, MOST_MODULES, MOST_PATCHED, SEAM, TABLES


@pytest.mark.parametrize("package", TABLES)
def test_a_table_declares_each_place_once(package):
    paths = [
        (path, backend)  # what it costs may differ by backend
        for one in internals.table(package).values()
        for path in one.spellings
        for backend in one.backends or BACKENDS
    ]
    assert len({*paths}) == len(paths) > 0
    for name, one in internals.table(package).items():
        assert {path.partition(":")[0].partition(".")[0] for path in one.spellings} == {one.package}
        assert {*one.backends} <= {*BACKENDS}, name
        assert one.feature, name
        assert one.without, name


@pytest.mark.parametrize("backend", BACKENDS)
def test_each_fit_needs_few(backend):
    needed = {name: one for name, one in internals.used_on(backend).items() if one.in_each_fit}
    assert 0 < len(needed) <= MOST_IN_EACH_FIT
    assert {one.without for one in needed.values()} == {"refused"}


@pytest.mark.parametrize("backend", BACKENDS)
def test_few_places_are_patched(backend):
    _, places = internals.patched_places(backend)
    assert 0 < len(places) <= MOST_PATCHED


def test_keras_src_is_imported_and_named_in_one_folder():
    assert {
        path for path, _ in internals.imports_of_keras() if not path.is_relative_to(SEAM)
    } == set()
    assert 0 < len(internals.modules_of_keras()) <= MOST_MODULES


def test_what_is_private_is_declared():
    assert [*map(str, internals.private_attributes())] == []
    assert [*map(str, internals.private_imports())] == []


def test_no_method_overrides_a_private_one_of_keras():
    assert [*map(str, internals.overridden_methods())] == []


LOOK = """
import importlib, json, pkgutil
import kerasdist
from kerasdist.core.internals import internals_of

names = [one.name for one in pkgutil.walk_packages(kerasdist.__path__, "kerasdist.")]
others = tuple(f"kerasdist.backends.{one}" for one in OTHERS)
for name in names:
    if not name.startswith(others) and not name.endswith("__main__"):
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name not in OTHERS:  # a user may have one framework alone
                raise
tables = {
    "keras": importlib.import_module("kerasdist.keras_compat.internals"),
    BACKEND: importlib.import_module(f"kerasdist.backends.{BACKEND}.internals"),
}
found = {
    f"{table}.{name}": one
    for table, of in tables.items()
    for name, one in internals_of(of).items()
}
early = [name for name, one in found.items() if "path" in vars(one)]
used = {name: one for name, one in found.items() if BACKEND in (one.backends or (BACKEND,))}
print(json.dumps([early, {name: one.path for name, one in used.items()}]))
"""


@pytest.fixture(scope="module", params=BACKENDS)
def looked(request):
    """What modules look for as they are imported; and where each internal is."""
    others = [one for one in BACKENDS if one != request.param]
    code = f"BACKEND, OTHERS = {request.param!r}, {others}\n{LOOK}"
    return json.loads(run_forked(code, request.param).splitlines()[-1])


def test_nothing_is_looked_for_while_modules_are_imported(looked):
    early, there = looked
    assert early == []
    assert there


def test_each_is_where_its_table_says_for_this_version(looked):
    for name, path in looked[1].items():
        table, _, own = name.partition(".")
        internal = internals.table(table)[own]
        assert [path] == (internals.spellings_here(internal) or [None])[:1], name


def test_a_spelling_is_for_versions():
    def is_of(versions, *others):
        return [internals.is_of(versions, Version(one)) for one in others]

    assert is_of("all", "3.12", "4.0") == [True, True]
    assert is_of("3.16", "3.15.1", "3.16.0.dev2026102704", "3.16.0", "4.0") == [False, *[True] * 3]
    assert is_of("3.12 to 3.15", "3.12.0", "3.15.9", "3.16.0.dev0") == [True, True, False]


def test_the_page_says_it():
    assert internals.PAGE.read_text("utf-8") == internals.page()
    one = next(iter(internals.table("keras").values()))
    assert internals._row(one) in internals.page()
    assert internals._row(replace(one, feature="something else")) not in internals.page()


# ------------------------------------------------------------------------- the counting


@pytest.mark.parametrize(
    "code",
    [
        "model._losses",
        "self._losses",
        "model._losses = []",
        "getattr(model, '_losses', None)",
        "hasattr(model, '_losses')",
        "inspect.getattr_static(model, '_losses')",
        "operator.attrgetter('_losses')",
        "vars(model)['_losses']",
        "torch._C._losses",
    ],
)
def test_a_private_attribute_is_found(code):
    found = internals.attributes_in(ast.walk(ast.parse(code)))
    assert "_losses" in [name for _, _, name in found]


def test_what_is_defined_is_ours():
    code = """
from a import _imported
_variable = 1
class Model:
    _of_the_class: int
    _pair, _other = 1, 2
    def _method(self):
        self._of_an_object = other._not_ours
        _local = 1
"""
    assert {
        name
        for name in internals.defined_in(ast.walk(ast.parse(code)))
        if internals.is_private(name)
    } == {
        *("_imported", "_variable", "_of_the_class", "_pair", "_other", "_method", "_of_an_object")
    }


def test_keras_classes_are_known_with_their_parents():
    assert {"_flatten_layers", "_symbolic_build", "_clear_losses"} <= internals.private_methods(
        "Model"
    )
    assert "_symbolic_build" not in internals.private_methods("Layer")


def test_the_installed_versions_are_known():
    assert all(framework_version(package) for package in TABLES)
