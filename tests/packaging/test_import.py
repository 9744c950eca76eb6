"""Importing kerasdist imports no framework, not even Keras (contract C3)."""

import sys
from pathlib import Path

import pytest

import kerasdist
from tests.fresh import run_fresh

ROOT = Path(__file__).parents[2]
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


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("MirorredStrategy", "Did you mean kerasdist.MirroredStrategy?"),
        ("MirrorStrategy", "Did you mean kerasdist.MirroredStrategy?"),
        ("mirroredstrategy", "Did you mean kerasdist.MirroredStrategy?"),
        ("ParameterServerStrategy", "without parameter servers. Use"),
        ("frobnicate", None),
    ],
)
def test_an_unknown_name_is_an_attribute_error_with_a_hint(name, hint):
    with pytest.raises(AttributeError) as caught:
        getattr(kerasdist, name)
    said = f"module 'kerasdist' has no attribute {name!r}."
    assert str(caught.value).startswith(said if hint is None else f"{said} ")
    assert (hint or said) in str(caught.value)


@pytest.mark.parametrize("strategy", ["MirroredStrategy", "auto"])
def test_a_backend_that_does_not_exist_is_told(strategy):
    code = f"""
import kerasdist
try:
    kerasdist.{strategy}()
except kerasdist.errors.BackendError as error:
    print(error)
"""
    said = run_fresh(code, KERAS_BACKEND="pytorch")
    assert "Received: backend='pytorch' (KERAS_BACKEND)." in said
    assert "Set the variable KERAS_BACKEND=torch." in said


@pytest.mark.parametrize("backend", BACKENDS)
def test_kerasdist_adds_no_framework_that_keras_did_not_import(backend):
    """And of our own backends only the chosen one."""
    code = """
import sys
top = lambda: {name.partition(".")[0] for name in sys.modules}
import keras
before = top()
import kerasdist as kd
for name in kd.__all__:
    getattr(kd, name)
added = top() - before
kd.OneDeviceStrategy("cpu:0")
print(*added)
print(*(name for name in sys.modules if name.startswith("kerasdist.backends.")))
"""
    added, own = map(str.split, run_fresh(code, KERAS_BACKEND=backend).splitlines()[-2:])
    assert not set(added) & set(FRAMEWORKS)
    assert {name.split(".")[2] for name in own} & set(BACKENDS) == {backend}


IMPORT_EACH_FIRST = """
import importlib, os, traceback
import keras
failed = []
for folder, names in %r.items():
    child = os.fork()
    if child == 0:  # Keras and its backend are there already, none of our modules is
        try:
            for name in names:
                importlib.import_module(name)
        except BaseException:
            print(folder, traceback.format_exc(), flush=True)
            os._exit(1)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        failed.append(folder)
print("failed:", *failed)
"""


def modules_for(backend: str) -> dict[str, list[str]]:
    """Every module of the package by folder, without other backends' folders."""
    others = set(BACKENDS) - {backend}
    found: dict[str, list[str]] = {}
    for path in sorted((ROOT / "kerasdist").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if parts[-1] != "__main__" and not (parts[1] == "backends" and parts[2] in others):
            name = ".".join(parts).removesuffix(".__init__")
            found.setdefault(".".join(parts[:-1]), []).append(name)
    return found


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_folder_can_be_imported_first(backend):
    """And all of it; no modules import each other: `tests/unit/test_house.py`."""
    modules = modules_for(backend)
    folder = f"kerasdist.backends.{backend}.fit"
    assert f"{folder}.trainer" in modules[folder]
    report = run_fresh(IMPORT_EACH_FIRST % modules, KERAS_BACKEND=backend)
    assert report.splitlines()[-1] == "failed:", report
