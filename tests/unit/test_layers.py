"""The layers of the package: who may import whom."""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "kerasdist"
SEAM = PACKAGE / "keras_compat"
FRAMEWORK_OF = {
    "tensorflow": "tensorflow",
    "jax": "jax",
    "jaxlib": "jax",
    "torch": "torch",
    "torch_xla": "torch",
}
# From bottom to top: what a unit imports when it is imported stands in a line above its own.
# A unit is a module or folder of the package, in api/ each module; backends/ is what all share. Two
# wings: what a program imports, up to `public`, and above it what the command line does.
LAYERS = (
    ("errors",),
    ("core",),
    ("config", "api.options", "api.values"),
    ("keras_compat", "cluster"),
    ("job", "input", "api.losses"),
    ("agreement",),
    ("backends",),
    ("api.layouts",),
    ("api.checkpoints", "api.extended", "api.functions", "api.replica_context", "api.scopes"),
    ("training.binding",),
    ("callbacks",),
    ("experimental", "training", "api.strategy"),
    ("check",),
    ("backends.tensorflow", "backends.jax", "backends.torch"),
    ("strategies",),
    ("public",),
    ("cli.options", "cli.formatting", "cli.launch"),
    ("cli.plan",),
    ("cli.diagnostics",),
    ("cli.app",),
    ("__main__",),
)
LAYER_OF = {unit: height for height, units in enumerate(LAYERS) for unit in units}
# Imports from a layer that is not below, made by a function when it is called.
LATE = {
    # num_accelerators, which tf.distribute's resolvers have too, asks the backend
    ("kerasdist.cluster.resolver", "backends"),
    # which backend is in force is found out when a call needs one
    ("kerasdist.config", "backends"),
    # a script that starts the other processes of its strategy is a launcher
    ("kerasdist.strategies.processes", "cli.launch"),
}
MEANINGLESS = {"utils", "util", "helpers", "helper", "common", "misc"}

FILES = sorted(PACKAGE.rglob("*.py"))


def imported(tree: ast.AST) -> Iterator[str]:
    """Every name that is imported anywhere below `tree`, as a dotted path.

    `from a import b` gives `a.b`, since b may be a module. `importlib.import_module("a.b")` and
    `__import__("a.b")` count too, when the name is a literal.
    """
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=module, names=names, level=0):
                yield from (f"{module}.{alias.name}" for alias in names)
            case ast.Call(func=func, args=[ast.Constant(value=str(name)), *_]):
                if ast.unparse(func) in ("importlib.import_module", "import_module", "__import__"):
                    yield name


def is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def imported_at_module_level(tree: ast.Module) -> Iterator[str]:
    """Like `imported`, for what importing the module runs; `if TYPE_CHECKING` is not run."""
    pending: list[ast.AST] = list(tree.body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from imported(node)
        elif isinstance(node, ast.If) and is_for_types(node):
            pending.extend(node.orelse)
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            pending.extend(ast.iter_child_nodes(node))


def imported_at_run_time(tree: ast.Module) -> set[str]:
    """Like `imported`, without what only type checkers see."""
    only_types = {
        name
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and is_for_types(node)
        for statement in node.body
        for name in imported(statement)
    }
    return set(imported(tree)) - only_types


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def unit_of(module: str) -> str | None:
    """Returns the unit of a dotted path in the package, None for the package itself."""
    parts = module.split(".")
    if parts[0] != "kerasdist" or len(parts) == 1:
        return None
    if parts[1] == "backends" and parts[2:3] and parts[2] in FRAMEWORK_OF.values():
        return f"backends.{parts[2]}"
    own = parts[1] in ("api", "cli") or parts[1:3] == ["training", "binding"]
    return ".".join(parts[1:3]) if own else parts[1]


@functools.cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def test_the_package_has_files():
    assert SEAM / "patches.py" in FILES  # a moved package must not empty the rules below


def frameworks_outside_of_their_folders(path: Path) -> list[str]:
    found = []
    for name in imported(parse(path)):
        framework = FRAMEWORK_OF.get(name.partition(".")[0])
        if framework and not path.is_relative_to(PACKAGE / "backends" / framework):
            found.append(name)
    return found


def imports_from_no_layer_below(path: Path) -> list[str]:
    module = module_of(path)
    unit = unit_of(module)
    if unit is None:  # the package itself, whose names are loaded when they are used
        return []
    tree = parse(path)
    at_once = set(imported_at_module_level(tree))
    found = []
    for name in imported_at_run_time(tree):
        other = unit_of(name)
        # `from kerasdist import MirroredStrategy` would load whatever has that name: it is no unit.
        if other in (None, unit) or LAYER_OF.get(other, len(LAYERS)) < LAYER_OF[unit]:
            continue
        if name in at_once or (module, other) not in LATE:
            found.append(name)
    return found


def integrations(path: Path) -> list[str]:
    others = ("kerasdist_ray", "ray", "kubernetes")
    return [name for name in imported(parse(path)) if name.partition(".")[0] in others]


def names_that_say_nothing(path: Path) -> set[str]:
    parts = path.relative_to(ROOT).parts
    return {part.removesuffix(".py").strip("_") for part in parts} & MEANINGLESS


# ruff's: imports of `keras.src` outside of keras_compat/, relative ones, missing docstrings.
RULES = (
    *(frameworks_outside_of_their_folders, imports_from_no_layer_below),
    *(integrations, names_that_say_nothing),
)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_no_file_has(rule):
    broken = {str(path.relative_to(ROOT)): found for path in FILES if (found := rule(path))}
    assert not broken


def test_every_unit_has_a_layer():
    units = {unit_of(module_of(path)) for path in FILES} - {None, "api", "cli"}
    assert units == set(LAYER_OF)
