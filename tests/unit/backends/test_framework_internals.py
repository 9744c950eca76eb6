"""What is not public in TensorFlow and JAX is in their tables alone, and there as declared."""

import ast
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fresh import run_forked

PACKAGE = Path(__file__).parents[3] / "kerasdist"
FILES = sorted(PACKAGE.rglob("*.py"))
FOLDERS = [PACKAGE / "backends" / name for name in ("tensorflow", "jax")]
TABLES = [folder / "internals.py" for folder in FOLDERS]
# They override methods of TensorFlow's classes, and call what they override.
OVERRIDING = PACKAGE / "backends" / "tensorflow" / "private"

# Modules, and what leads to them: of TensorFlow no compatibility is promised below `tf.` either.
PRIVATE_MODULES = (
    *("tensorflow.python", "tensorflow.core", "tensorflow.tsl", "tensorflow.compiler"),
    *("tf.python", "tf.__internal__", "tensorflow.__internal__"),
    *("jax._src", "jax.experimental", "jax.core", "jax.interpreters", "jax.extend", "jaxlib"),
    "jax.config.values",
)
# Of Python: tuples with names, and `sys`.
PUBLIC = {"_fields", "_replace", "_asdict", "_make", "_getframe"}
# Keras's, which another test looks at.
OF_KERAS = {"_symbolic_build", "_get_jax_state", "_get_iterator", "_reduction_axes"}


def dotted(node: ast.AST) -> str | None:
    """Returns ``"a.b.c"`` for the names and attributes of a chain."""
    if isinstance(node, ast.Name):
        return node.id
    outer = dotted(node.value) if isinstance(node, ast.Attribute) else None
    return None if outer is None else f"{outer}.{node.attr}"


def names_in(tree: ast.AST) -> Iterator[str]:
    """Yields the modules that code imports, the chains of attributes, and its texts."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=str(module), names=names, level=0):
                yield from (f"{module}.{alias.name}" for alias in names)
            case ast.Attribute():
                yield dotted(node) or ""
            case ast.Constant(value=str(text)) if "." in text and " " not in text:
                yield text.replace(":", ".")


def private_modules(tree: ast.AST) -> set[str]:
    return {
        name
        for name in names_in(tree)
        if any(f"{name}.".startswith(f"{module}.") for module in PRIVATE_MODULES)
    }


def private_attributes(tree: ast.AST) -> set[str]:
    """Returns the attributes with an underscore that code takes from an object, or from a text."""
    found = set()
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=owner, attr=name):
                is_own = isinstance(owner, ast.Name) and owner.id in ("self", "cls")
                found |= set() if is_own else {name}
            case ast.Call(func=ast.Name(id="getattr" | "setattr" | "hasattr" | "delattr")):
                found |= {one.value for one in node.args if isinstance(one, ast.Constant)}
            case ast.Subscript(value=ast.Call(func=ast.Name(id="vars")), slice=ast.Constant()):
                found.add(node.slice.value)
    texts = {name for name in found if isinstance(name, str)}
    return {name for name in texts if name.startswith("_") and not name.startswith("__")}


def defined(tree: ast.AST) -> set[str]:
    """Returns the names of methods, and of attributes of `self` and of classes, of the package."""
    found = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                found.add(name)
            case ast.AnnAssign(target=ast.Name(id=name)) | ast.Name(id=name, ctx=ast.Store()):
                found.add(name)
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                found.add(name)
    return found


@pytest.fixture(scope="module")
def trees() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text("utf-8")) for path in FILES}


def test_private_modules_are_named_in_the_tables_alone(trees):
    named = {path for path, tree in trees.items() if private_modules(tree)}
    # Keras takes pipelines of TensorFlow, and JAX's sparse arrays, which are in `experimental`.
    of_keras = {PACKAGE / "keras_compat" / name for name in ("internals.py", "data.py")}
    assert named == {*TABLES, *of_keras}


def test_private_attributes_are_named_in_the_tables_alone(trees):
    own = set[str]().union(*map(defined, trees.values()))
    declared = {name.rpartition(".")[2] for table in TABLES for name in names_in(trees[table])}
    assert {"_create_variable", "_distribution_strategy_stack"} <= declared
    for path, tree in trees.items():
        if any(path.is_relative_to(folder) for folder in FOLDERS):
            # A declared name is that of the framework, unless it is overridden here.
            ours = own if path.parent == OVERRIDING else own - declared
            assert not private_attributes(tree) - ours - PUBLIC - OF_KERAS, path


CODE = """
import tensorflow as tf
from jax.experimental import mesh_utils
from tensorflow.python.eager import context

values = jax.config.values
jax.core.Tracer, tf.data.Dataset, jax.numpy.sum
importlib.import_module("tensorflow.python.ops:x")
class Own:
    _mine = 1
    def take(self, other):
        self._own = other._mine + other._theirs + getattr(other, "_hidden") + vars(other)["_kept"]
"""


def test_the_walk_finds_what_is_private():
    tree = ast.parse(CODE)
    assert private_modules(tree) == {
        *("jax.experimental.mesh_utils", "tensorflow.python.eager.context"),
        *("jax.config.values", "jax.core", "jax.core.Tracer", "tensorflow.python.ops.x"),
    }
    assert private_attributes(tree) - defined(tree) == {"_theirs", "_hidden", "_kept"}


PROBE = """
import json, sys
import kerasdist, keras
from kerasdist.backends.{0} import internals
from kerasdist.core.internals import internals_of
# Nothing is looked for while modules are imported.
import kerasdist.backends.{0}.backend
table = internals_of(internals)
looked = [name for name, one in table.items() if "_here" in vars(one) or "_found" in vars(one)]
gone = [name for name, one in table.items() if not one.is_there()]
packages = sorted({{one.package for one in table.values()}})
in_each_fit = sum(one.in_each_fit for one in table.values())
print(json.dumps([looked, gone, packages, in_each_fit <= 8, len(table) > 0]))
"""


@pytest.mark.parametrize("backend", ["tensorflow", "jax"])
def test_each_declared_internal_is_there(backend):
    output = run_forked(PROBE.format(backend), backend)
    assert json.loads(output.splitlines()[-1]) == [[], [], [backend], True, True]
