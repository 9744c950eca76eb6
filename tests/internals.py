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
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.version import Version

from kerasdist.core.backend_choice import framework_version
from kerasdist.core.internals import EVERY_VERSION, Internal, internals_of
from tests.fresh import run_forked
from tests.unit.test_layers import FILES, PACKAGE, ROOT, SEAM, imported, parse

BACKENDS = ("tensorflow", "jax", "torch")
TABLES = {
    "keras": SEAM / "internals.py",
    **{backend: PACKAGE / "backends" / backend / "internals.py" for backend in BACKENDS},
}
PAGE = ROOT / "docs" / "what-we-hold-on-to.md"
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
    "source._data_source": "Grain's loaders say in no other way what they read; it may be missing",
    "source._sampler": "likewise",
    "_inheriting": "multiprocessing's: whether this process is being started by it",
}


@functools.cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """Returns all nodes of a file's syntax tree."""
    return tuple(ast.walk(parse(path)))


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


def spellings_here(internal: Internal) -> list[str]:
    """The spellings that the table declares for the installed version, if one is."""
    version = framework_version(internal.package)
    spellings = internal.spellings.items() if version else ()
    return [path for path, versions in spellings if is_of(versions, Version(version))]


def modules_of_keras() -> list[str]:
    """The modules of `keras.src` that the package names, in its tables or elsewhere."""
    texts = (
        node.value
        for path in FILES
        for node in nodes(path)
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


def imports_of_keras() -> list[tuple[Path, str]]:
    """The statements that import from `keras.src`: file, and module."""
    found = []
    for path in FILES:
        for node in nodes(path):
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
    """Private attributes that are read or set, and are neither ours nor declared.

    Ours are those that the package defines, of `self`; and of another object, those that the same
    file defines. A declared one may be read in the folder, or module, that is for its package.
    """
    definitions = {path: set(defined_in(nodes(path))) for path in FILES}
    ours = set().union(*definitions.values())
    return [
        Use(path, node.lineno, f"{owner}.{name}")
        for path in FILES
        for node, owner, name in attributes_in(nodes(path))
        if is_private(name) and not {f"{owner}.{name}", name} & ALLOWED.keys()
        if name not in (ours if owner in ("self", "cls", "super()") else definitions[path])
        if name not in declared_for(path)
    ]


@functools.cache
def declared_for(path: Path) -> frozenset[str]:
    """The names that are declared for what a file is about: those of Keras in keras_compat/."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    if parts[0] == SEAM.name:
        package = "keras"
    elif parts[0] == "backends" and "private" in parts:
        package = parts[1]
    else:
        return frozenset()
    paths = (path for one in table(package).values() for path in one.spellings)
    return frozenset(re.split("[.:]", path)[-1] for path in paths)


def attributes_in(found: Iterable[ast.AST]) -> Iterator[tuple[ast.expr, str, str]]:
    """The attributes that code uses, by their names in strings too: node, owner, name."""
    for node in found:
        match node:
            case ast.Attribute(value=owner, attr=name):
                yield node, ast.unparse(owner), name
            case ast.Call(args=[owner, ast.Constant(value=str(name)), *_]):
                if re.search(r"(get|has|set|del)attr(_static)?$", ast.unparse(node.func)):
                    yield node, ast.unparse(owner), name
            case ast.Subscript(value=owner, slice=ast.Constant(value=str(name))):
                if re.search(r"^vars\(|__dict__$", ast.unparse(owner)):
                    yield node, ast.unparse(owner), name
            case ast.Call(args=[ast.Constant(), *_]):
                if ast.unparse(node.func).endswith(("attrgetter", "methodcaller")):
                    yield from (
                        (node, "", name) for one in node.args for name in str(one.value).split(".")
                    )


def is_private(name: str) -> bool:
    return re.fullmatch(r"_[a-zA-Z]\w*", name) is not None


def defined_in(found: Iterable[ast.AST]) -> Iterator[str]:
    """The names that modules and classes define or import, or assign to themselves."""
    for node in found:
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
        for name, other in re.findall(r"(\w+) as (\w+)", text):
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
    """Methods of our classes that override private ones of the class of Keras they derive from."""
    classes = {
        node.name: (path, node)
        for path in FILES
        for node in nodes(path)
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
            for each in nodes(path)
            if isinstance(each, ast.Assign) and base in bound_by(each)
        ]
        for one in [base, *meant]:
            if one.startswith(("keras.", "keras_compat.")):
                found.add(one.rpartition(".")[2])
    return found


# ------------------------------------------------------------------------------ what is patched


@dataclass(frozen=True)
class Patched:
    """A row of the table of patches, in words."""

    place: str
    functions: str
    reason: str
    backends: str


@functools.cache
def patched_places(backend: str) -> tuple[tuple[Patched, ...], tuple[str, ...]]:
    """The table of patches, and the places that a strategy has patched in Keras on a backend."""
    rows, places = json.loads(run_forked(_PATCHES, backend).splitlines()[-1])
    return tuple(Patched(*row) for row in rows), tuple(places)


_PATCHES = """
import json
import kerasdist as kd
kd.MirroredStrategy(["cpu:0", "cpu:1"])
from kerasdist.keras_compat.patches import PATCHES, patched
rows = [
    [
        one.target if isinstance(one.target, str) else next(iter(one.target.spellings)),
        ", ".join(one.functions),
        one.reason,
        ", ".join(one.backends),
    ]
    for one in PATCHES
]
print(json.dumps([rows, patched()]))
"""


# ----------------------------------------------------------------------------------- the page

HEAD = """# What kerasdist holds on to

<!-- Written by `python -m tests.internals page` (`make internals`). Do not edit. -->

For maintainers. kerasdist trains Keras's own models, so it uses private parts of Keras and of the
frameworks, which a release may move or remove. Each part is declared once, in
`kerasdist/keras_compat/internals.py` or `kerasdist/backends/<framework>/internals.py`. If a part is
missing, the feature that needs it either raises an error that names the part, or works in a reduced
way; the tables say which. Everything else works. **When a new Keras or framework has come out:**

1. Install it and run `kerasdist doctor`, which lists the missing parts. If users of today's
   kerasdist lose nothing important by them, the repair can wait for the next release.
2. `pytest tests/unit/test_internals.py tests/unit/test_keras_compat.py` checks that each part is
   where the table says for this version, and takes the arguments that kerasdist passes.
3. `python -m tests.versions.selection torch`, and the same for `jax` and `tensorflow`, check that
   the numbers still equal those of one device.
4. If a part has moved, use a public function in its place. If there is none, add the new name to
   the part's entry in the table, before the older names. If a part is gone for good, compute the
   feature in another way, or remove it.
5. `make internals` writes this page. `pytest tests/versions/test_gone.py` removes each part in
   turn, and checks that only its own feature is lost. `make versions` runs everything, and writes
   [the page of versions](versions.md).
"""
SPOKEN = {"keras": "Keras", "tensorflow": "TensorFlow", "jax": "JAX", "torch": "PyTorch"}


def page() -> str:
    declared = [one for package in TABLES for one in table(package).values()]
    needed = {
        backend: sum(one.in_each_fit for one in used_on(backend).values()) for backend in BACKENDS
    }
    each = ", ".join(f"{number} on {SPOKEN[backend]}" for backend, number in needed.items())
    parts = [
        f"{HEAD}\nThere are {len(declared)} places. Each `fit` needs few of them: {each}. They "
        "come first, and without one nothing is trained.\n"
    ]
    for package, name in SPOKEN.items():
        found = [one for one in declared if one.package == package]
        parts.append(f"\n## {name}\n\n")
        parts.append("| place | versions | feature | without it | on |\n|---|---|---|---|---|\n")
        parts += map(_row, sorted(found, key=lambda one: not one.in_each_fit))
    rows, places = patched_places("torch")
    parts.append(
        f"\n## Patched in Keras\n\nOn PyTorch {len(places)} places are patched, as the first "
        "strategy is made; what no extension point of Keras reaches. Those of `Model`, `Layer`, "
        "`Optimizer` and `Variable` are mostly methods of one more base of the class, and count as "
        "one place each. On models that no strategy has made they change nothing.\n\n"
        "| in Keras | function | for | on |\n|---|---|---|---|\n"
    )
    for one in rows:
        backends = _spoken(one.backends.split(", "))
        parts.append(f"| `{one.place}` | `{one.functions}` | {one.reason} | {backends} |\n")
    return "".join(parts)


def _row(internal: Internal) -> str:
    cells = (
        "<br>".join(f"`{path}`" for path in internal.spellings),
        "<br>".join(map(_in_words, internal.spellings.values())),
        "**each `fit`:** " * internal.in_each_fit + internal.feature,
        internal.without,
        _spoken(internal.backends) if internal.package == "keras" else SPOKEN[internal.package],
    )
    return f"| {' | '.join(cells)} |\n"


def _in_words(versions: str) -> str:
    return versions if versions == EVERY_VERSION or " to " in versions else f"from {versions}"


def _spoken(backends: Iterable[str]) -> str:
    return ", ".join(SPOKEN[one] for one in backends if one) or "all"


# ----------------------------------------------------------------------------------- the command


def counts() -> dict[str, Sequence[object]]:
    """What is counted, by name."""
    return {
        "internals declared": [f"{p}.{name}" for p in TABLES for name in table(p)],
        **{
            f"needed by each fit on {backend}": [
                name for name, one in used_on(backend).items() if one.in_each_fit
            ]
            for backend in BACKENDS
        },
        **{f"places patched on {backend}": patched_places(backend)[1] for backend in BACKENDS},
        "statements that import keras.src": [
            f"{path.relative_to(ROOT)}: {module}" for path, module in imports_of_keras()
        ],
        "modules of keras.src": modules_of_keras(),
        "private attributes that are read beside the tables": private_attributes(),
        "private modules of frameworks that are imported": private_imports(),
        "private methods of Keras that classes override": overridden_methods(),
    }


def main():
    if sys.argv[1:] == ["page"]:
        PAGE.write_text(page(), encoding="utf-8")
        return
    for name, found in counts().items():
        print(f"{name}: {len(found)}")
        for one in found:
            print(f"    {one}")


if __name__ == "__main__":
    main()
