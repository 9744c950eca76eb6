"""What kerasdist holds on to in Keras and the frameworks: the counts, and the page that says it.

    python -m tests.internals         prints the counts, and what they count
    python -m tests.internals page    writes docs/what-we-hold-on-to.md

A table is read by itself, uses from the syntax trees: no framework is imported. The patched places
alone are told by a process that has imported Keras.
"""

import ast
import functools
import importlib.util
import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from packaging.version import Version

from kerasdist.core.internals import EVERY_VERSION, Internal, internals_of
from tests.unit.test_layers import FILES, PACKAGE, ROOT, SEAM, imported, parse

BACKENDS = ("tensorflow", "jax", "torch")
TABLES = {
    "keras": SEAM / "internals.py",
    **{backend: PACKAGE / "backends" / backend / "internals.py" for backend in BACKENDS},
}
MOST_MODULES = 25
MOST_PATCHED = 30
MOST_IN_EACH_FIT = 8

# Names with an underscore that are public, or Python's: neither Keras's nor a framework's.
ALLOWED = {
    "sys._getframe": "documented; the only way to the frame of a caller",
    "sys._current_frames": "documented; what each thread does, for a report of a hang",
    "os._exit": "documented; ends a forked process, or one whose threads wait for good",
    "_fields": "a named tuple's, documented",
    "_make": "a named tuple's, documented",
    "_replace": "a named tuple's, documented",
    "_inheriting": "multiprocessing's: whether this process is being started by it",
}


# ---------------------------------------------------------------------------------- the tables


@functools.cache
def table(package: str) -> Mapping[str, Internal]:
    """The internals of a package, by their names in its table."""
    spec = importlib.util.spec_from_file_location(f"internals_of_{package}", TABLES[package])
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return internals_of(module)


def used_on(backend: str) -> dict[str, Internal]:
    """The internals that are used on a backend, by their names in both tables."""
    found = {**table("keras"), **table(backend)}
    return {name: one for name, one in found.items() if backend in (one.backends or BACKENDS)}


def is_of(versions: str, version: Version) -> bool:
    """Whether a spelling is for a version: ``"3.16"`` is that and all later ones."""
    if versions == EVERY_VERSION:
        return True
    first, _, last = versions.partition(" to ")
    # A nightly of 3.16 is before 3.16, and has what that will have.
    release = version.release
    if release < Version(first).release:
        return False
    return not last or release[: len(Version(last).release)] <= Version(last).release


def modules_of_keras() -> list[str]:
    """The modules of `keras.src` that the package names, in its tables or elsewhere."""
    texts = (
        node.value
        for path in FILES
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
    named = {each for text in texts for each in re.findall(r"^(keras\.src[\w.]*)(?::|$)", text)}
    return sorted(named | {module for _, module in imports_of_keras()})


# ------------------------------------------------------------------------- uses beside the tables


@dataclass(frozen=True)
class Use:
    """A use of something private, and where it stands."""

    path: Path
    line: int
    name: str

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}: {self.name}"

    @property
    def is_in_the_seam(self) -> bool:
        return self.path.is_relative_to(SEAM)


def imports_of_keras() -> list[tuple[Path, str]]:
    """The statements that import from `keras.src`: file, and module."""
    found = []
    for path in FILES:
        for node in ast.walk(parse(path)):
            match node:
                case ast.Import(names=names):
                    found += [(path, one.name) for one in names if is_of_keras(one.name)]
                case ast.ImportFrom(module=str(module)) if is_of_keras(module):
                    found.append((path, module))
                case ast.Call(args=[ast.Constant(value=str(name)), *_]) if is_of_keras(name):
                    if ast.unparse(node.func).endswith(("import_module", "__import__")):
                        found.append((path, name))
    return found


def is_of_keras(module: str) -> bool:
    return module == "keras.src" or module.startswith("keras.src.")


def private_imports() -> list[Use]:
    """Imports of private modules and names of frameworks; Keras's are `imports_of_keras`."""
    return [
        Use(path, 0, name)
        for path in FILES
        for name in imported(parse(path))
        if not name.startswith(("kerasdist.", "keras.src", "__"))
        if any(map(is_private, name.split("."))) or name.startswith("tensorflow.python")
    ]


def private_attributes() -> list[Use]:
    """Private attributes that are read or set, and are not of a class or module of ours.

    Of ours is what is defined in the package, for `self`, and in the same file for another object.
    """
    definitions = {path: set(defined_in(parse(path))) for path in FILES}
    ours = set().union(*definitions.values())
    return [
        Use(path, node.lineno, f"{owner}.{name}")
        for path in FILES
        for node, owner, name in attributes_in(parse(path))
        if is_private(name) and not {f"{owner}.{name}", name} & ALLOWED.keys()
        if name not in (ours if owner in ("self", "cls", "super()") else definitions[path])
    ]


def attributes_in(tree: ast.AST) -> Iterator[tuple[ast.expr, str, str]]:
    """The attributes that a tree uses, by their names in strings too: node, owner, name."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=owner, attr=name):
                yield node, ast.unparse(owner), name
            case ast.Call(args=[owner, ast.Constant(value=str(name)), *_]):
                if re.search(r"(get|has|set|del)attr(_static)?$", ast.unparse(node.func)):
                    yield node, ast.unparse(owner), name
            case ast.Call(args=[ast.Constant(), *_]):
                if ast.unparse(node.func).endswith("attrgetter"):
                    yield from (
                        (node, "", name) for one in node.args for name in str(one.value).split(".")
                    )


def is_private(name: str) -> bool:
    return re.fullmatch(r"_[a-zA-Z]\w*", name) is not None


def defined_in(tree: ast.AST) -> Iterator[str]:
    """The names that modules and classes below `tree` define or import, or assign to themselves."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.name
            case ast.Attribute(value=ast.Name(id="self" | "cls"), ctx=ast.Store()):
                yield node.attr
        if isinstance(node, ast.Module | ast.ClassDef):
            for statement in node.body:
                yield from bound_by(statement)


def bound_by(statement: ast.stmt) -> Iterator[str]:
    """The names that a statement binds by assignment or import."""
    match statement:
        case ast.Import(names=names) | ast.ImportFrom(names=names):
            yield from (alias.asname or alias.name for alias in names)
        case ast.Assign(targets=targets):
            yield from (n.id for one in targets for n in ast.walk(one) if isinstance(n, ast.Name))
        case ast.AnnAssign(target=ast.Name(id=name)):
            yield name


# ------------------------------------------------------------ methods that override Keras's by name


@functools.cache
def classes_of_keras() -> tuple[dict[str, set[str]], dict[str, set[str]]]:
    """Keras's classes by name, whichever module: their parents, and their private methods."""
    parents: dict[str, set[str]] = {}
    methods: dict[str, set[str]] = {}
    folder = Path(importlib.util.find_spec("keras").submodule_search_locations[0]) / "src"
    for path in folder.rglob("*.py"):
        if path.stem.endswith("_test"):
            continue
        text = path.read_text("utf-8")
        for name, other in re.findall(r"import (\w+) as (\w+)", text):
            parents.setdefault(other, set()).add(name)
        heads = [*re.finditer(r"^class (\w+)(?:\(([^)]*)\))?:", text, re.M)]
        for head, following in itertools.zip_longest(heads, heads[1:]):
            body = text[head.end() : following.start() if following else None]
            bases = re.findall(r"(\w+)(?=\s*(?:,|$))", head[2] or "")
            parents.setdefault(head[1], set()).update(bases)
            found = re.findall(r"^    def (_[a-zA-Z]\w*)", body, re.M)
            methods.setdefault(head[1], set()).update(found)
    return parents, methods


def private_methods(kind: str) -> set[str]:
    """The private methods that a class of Keras has from itself and its parents."""
    parents, methods = classes_of_keras()
    seen, todo = set(), {kind}
    while todo:
        seen |= todo
        todo = set().union(*(parents.get(one, ()) for one in todo)) - seen
    return set().union(*(methods.get(one, ()) for one in seen))


def overridden_methods() -> list[Use]:
    """Methods of our classes that override a private one of the class of Keras they derive from."""
    classes = {
        node.name: (path, node)
        for path in FILES
        for node in ast.walk(parse(path))
        if isinstance(node, ast.ClassDef)
    }
    return [
        Use(path, method.lineno, f"{name}.{method.name}")
        for name, (path, node) in classes.items()
        if (kinds := _kinds_of_keras(name, classes))
        for method in node.body
        if isinstance(method, ast.FunctionDef) and is_private(method.name)
        if any(method.name in private_methods(kind) for kind in kinds)
    ]


def _kinds_of_keras(name: str, classes: Mapping[str, tuple[Path, ast.ClassDef]]) -> set[str]:
    """The classes of Keras that a class of ours derives from; through names for types too."""
    path, node = classes[name]
    found = set()
    for base in map(ast.unparse, node.bases):
        if base in classes and base != name:
            found |= _kinds_of_keras(base, classes)
            continue
        meant = [
            ast.unparse(each.value)
            for each in ast.walk(parse(path))
            if isinstance(each, ast.Assign) and base in bound_by(each)
        ]
        for one in [base, *meant]:
            if one.startswith(("keras.", "keras_compat.")):
                found.add(one.rpartition(".")[2])
    return found


# ---------------------------------------------------------------------------------- printed


def main():
    outside = [use for use in private_attributes() if not use.is_in_the_seam]
    for name, found in {
        "statements that import keras.src": [
            f"{path.relative_to(ROOT)}: {module}" for path, module in imports_of_keras()
        ],
        "modules of keras.src": modules_of_keras(),
        "private attributes outside of keras_compat/": outside,
        "private attributes in it, not by the table": [
            use for use in private_attributes() if use.is_in_the_seam
        ],
        "private modules of frameworks": private_imports(),
        "private methods of Keras that are overridden": overridden_methods(),
    }.items():
        print(f"{name}: {len(found)}")
        for one in found:
            print(f"    {one}")


if __name__ == "__main__":
    main()
