"""Importing kerasdist imports no framework, not even Keras (contract C3)."""

import sys

import pytest

from tests.fresh import run_fresh

FRAMEWORKS = ("keras", "tensorflow", "jax", "jaxlib", "torch")
BACKENDS = ("tensorflow", "jax", "torch")


def modules_after(code: str, **environment: str) -> set[str]:
    """Return the top-level modules that `code` has imported."""
    report = "import sys; print(*{name.partition('.')[0] for name in sys.modules})"
    return set(run_fresh(f"{code}\n{report}", **environment).splitlines()[-1].split())


def test_import_takes_the_standard_library_alone():
    # The site module imports things of its own (.pth files of installed packages).
    added = modules_after("import kerasdist") - modules_after("pass") - {"kerasdist"}
    assert added <= set(sys.stdlib_module_names)


def test_listing_the_names_imports_no_framework():
    added = modules_after("import kerasdist; dir(kerasdist); kerasdist.__version__")
    assert not added & set(FRAMEWORKS)


def test_errors_config_and_cluster_import_no_framework():
    added = modules_after(
        "import kerasdist; kerasdist.errors; kerasdist.config; kerasdist.cluster.detect()"
    )
    assert not added & set(FRAMEWORKS)


def test_an_unknown_name_is_an_attribute_error():
    code = """
import kerasdist
try:
    kerasdist.MirorredStrategy
except AttributeError as error:
    print(error)
"""
    assert "MirorredStrategy" in run_fresh(code)


@pytest.mark.parametrize("backend", BACKENDS)
def test_kerasdist_adds_no_framework_that_keras_did_not_import(backend):
    keras_alone = modules_after("import keras", KERAS_BACKEND=backend)
    every_name = "for name in kerasdist.__all__: getattr(kerasdist, name)"
    with_kerasdist = modules_after(f"import keras, kerasdist\n{every_name}", KERAS_BACKEND=backend)
    assert not (with_kerasdist - keras_alone) & set(FRAMEWORKS)


@pytest.mark.parametrize("backend", BACKENDS)
def test_only_the_chosen_backend_of_ours_is_imported(backend):
    code = """
import kerasdist as kd
kd.OneDeviceStrategy("cpu:0")
import sys
print(*(name for name in sys.modules if name.startswith("kerasdist.backends.")))
"""
    names = run_fresh(code, KERAS_BACKEND=backend).splitlines()[-1].split()
    found = {name.split(".")[2] for name in names} & set(BACKENDS)
    assert found == {backend}
