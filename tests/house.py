"""Prints how large the package is, how wide the waist, and which imports go in a circle.

    python -m tests.house

The waist is what the package knows of a backend: the abstract classes of `kerasdist/backends/`.
"""

import ast
import io
import tokenize
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from tests.unit.test_layers import FILES, PACKAGE, imported_at_module_level, module_of, parse

BACKENDS = PACKAGE / "backends"
WAIST_FILES = ("base.py", "runner.py", "collectives.py")
WAIST = [BACKENDS / name for name in WAIST_FILES]
FRAMEWORKS = ("tensorflow", "jax", "torch")
# How many lines a room of the package may have: see docs/adr/0045-budgets-of-lines.md. "." has the
# modules beside the packages, "backends" those beside the backends.
BUDGETS = {
    ".": 3000,
    "agreement": 850,
    "backends": 2000,
    "backends/jax": 5700,
    "backends/tensorflow": 5600,
    "backends/torch": 6400,
    "callbacks": 3650,
    "checks": 1900,
    "cluster": 1900,
    "experimental": 100,
    "input": 1500,
    "job": 2450,
    "keras_compat": 1950,
    "launch": 3400,
    "plan": 1850,
    "strategies": 1200,
    "training": 3050,
}
_NO_CODE = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
)


def lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def lines_of_code(path: Path) -> int:
    """Lines with code on them: no blank ones, no comments, no docstrings."""
    text = path.read_text(encoding="utf-8")
    documentation = {
        number
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node.value.value, str)
        for number in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    code = {
        number
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type not in _NO_CODE
        for number in range(token.start[0], token.end[0] + 1)
    }
    return len(code - documentation)


def room_of(path: Path) -> str:
    """The part of the package that a module belongs to, as `BUDGETS` names it."""
    folders = path.relative_to(PACKAGE).parent.parts
    return "/".join(folders[: 2 if folders[:1] == ("backends",) else 1]) or "."


def sizes() -> dict[str, int]:
    """The lines of each room."""
    found: dict[str, int] = {}
    for path in FILES:
        found[room_of(path)] = found.get(room_of(path), 0) + lines(path)
    return dict(sorted(found.items()))


def classes(path: Path) -> Iterator[ast.ClassDef]:
    return (node for node in parse(path).body if isinstance(node, ast.ClassDef))


def is_abstract(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef) and any(
        ast.unparse(one).endswith("abstractmethod") for one in node.decorator_list
    )


def members(owner: ast.ClassDef) -> Iterator[tuple[str, bool]]:
    """The public methods and properties of a class, and whether each is abstract."""
    for node in owner.body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            yield node.name, is_abstract(node)


def waist() -> dict[str, bool]:
    """The members of the abstract classes, and whether each is abstract."""
    return {
        f"{owner.name}.{name}": abstract
        for path in WAIST
        for owner in classes(path)
        if any(map(is_abstract, owner.body))
        for name, abstract in members(owner)
    }


def implemented_by(member: str) -> list[str]:
    """The frameworks that have a member: by name, in a class that names the waist's as a base."""
    owner, _, name = member.partition(".")
    return [
        framework
        for framework in FRAMEWORKS
        if any(
            name in dict(members(one)) and any(owner in ast.unparse(base) for base in one.bases)
            for path in (BACKENDS / framework).rglob("*.py")
            for one in classes(path)
        )
    ]


def circles() -> list[str]:
    """The modules of the first circle of imports that is found, empty if there is none."""
    modules = {module_of(path): path for path in FILES}
    graph = {
        module: {
            known
            for name in imported_at_module_level(parse(path))
            for known in (name, name.rpartition(".")[0])
            if known in modules and known != module and not module.startswith(f"{known}.")
        }
        for module, path in modules.items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def main():
    backends = [path for path in FILES if path.is_relative_to(BACKENDS)]
    print(f"lines of the package:          {sum(map(lines, FILES)):6}")
    print(f"lines of backends/:            {sum(map(lines, backends)):6}")
    print(f"lines of code of the package:  {sum(map(lines_of_code, FILES)):6}")
    print(f"lines of code of backends/:    {sum(map(lines_of_code, backends)):6}")
    for room, size in sizes().items():
        print(f"  {room:29}{size:6} of {BUDGETS.get(room, 0):5}")
    print(f"files over 400 lines:          {sum(lines(path) > 400 for path in FILES):6}")
    known = waist()
    print(f"abstract methods of the waist: {sum(known.values()):6}")
    print(f"members of the waist:          {len(known):6}")
    lonely = [name for name, abstract in known.items() if not abstract]
    lonely = [name for name in lonely if len(implemented_by(name)) == 1]
    print(f"members of one backend only:   {len(lonely):6}  {', '.join(lonely)}")
    print(f"circle of imports:             {' -> '.join(circles()) or 'none':>6}")


if __name__ == "__main__":
    main()
