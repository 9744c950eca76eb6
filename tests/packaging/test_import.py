"""Importing kerasdist imports no framework, not even Keras (contract C3)."""

import sys

import pytest

import kerasdist
from tests.fresh import run_forked, run_fresh

FRAMEWORKS = ("keras", "tensorflow", "jax", "jaxlib", "torch")
BACKENDS = ("tensorflow", "jax", "torch")


STAGES = """
import sys
tell = lambda: print(*{name.partition(".")[0] for name in sys.modules})
tell()
import kerasdist
tell()
dir(kerasdist), kerasdist.__version__, kerasdist.errors, kerasdist.config
kerasdist.cluster.detect()
tell()
"""


def test_import_takes_the_standard_library_alone():
    """And what starts a job, or asks for one, takes no framework."""
    # The site module imports things of its own (.pth files of installed packages).
    before, imported, used = map(set, map(str.split, run_fresh(STAGES).splitlines()))
    assert imported - before - {"kerasdist"} <= set(sys.stdlib_module_names)
    assert not (used - before) & set(FRAMEWORKS)


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


def test_a_backend_that_does_not_exist_is_told():
    code = """
import kerasdist
for name in ("MirroredStrategy", "auto"):
    try:
        getattr(kerasdist, name)()
    except kerasdist.errors.BackendError as error:
        print(error)
"""
    said = run_fresh(code, KERAS_BACKEND="pytorch")
    assert said.count("Received: backend='pytorch' (KERAS_BACKEND).") == 2
    assert said.count("Set the variable KERAS_BACKEND=torch.") == 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_kerasdist_adds_no_framework_that_keras_did_not_import(backend):
    """Of our own backends only the chosen one, and nothing of the command line."""
    code = """
import sys
top = lambda: {name.partition(".")[0] for name in sys.modules}
import keras
assert not any(name.startswith("kerasdist") for name in sys.modules)
before = top()
import kerasdist as kd
for name in set(kd.__all__) - {"launch"}:
    getattr(kd, name)
assert not any(name.startswith("kerasdist.cli") for name in sys.modules)
kd.launch
added = top() - before
kd.OneDeviceStrategy("cpu:0")
print(*added)
print(*(name for name in sys.modules if name.startswith("kerasdist.backends.")))
"""
    added, own = map(str.split, run_forked(code, backend).splitlines()[-2:])
    assert not set(added) & set(FRAMEWORKS)
    assert {name.split(".")[2] for name in own} & set(BACKENDS) == {backend}
