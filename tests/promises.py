"""Prints each promise and the tests that hold it: contracts, repairs, sentences of the docs.

    python -m tests.promises

Entries stand in `tests/docs/claims.toml`. `tests/docs/test_promises.py` fails if one has none.
"""

import ast
import functools
import tomllib
from collections.abc import Iterator
from pathlib import Path

from tests.conformance import registry
from tests.fresh import ROOT

PROMISES = tomllib.loads((ROOT / "tests" / "docs" / "claims.toml").read_text("utf-8"))
_SHOWN = 4


@functools.cache
def functions(path: Path) -> list[tuple[str, str]]:
    """Names and docstrings of a file's functions; of the file itself, without a name."""
    tree = ast.parse(path.read_text("utf-8"))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    found = [one for one in ast.walk(tree) if isinstance(one, kinds)]
    own = [(one.name, ast.get_docstring(one) or "") for one in found]
    return [("", ast.get_docstring(tree) or ""), *own]


def held_by(test: str) -> Iterator[str]:
    """The tests that an entry names: a file's functions, or a suite's cases."""
    file, colon, start = test.partition(":")
    if colon:
        names = [name for name, _ in functions(ROOT / file) if name]
        exact = [start] if start in names else [one for one in names if one.startswith(start)]
        # Cases that a loop or a table makes have their names in quotes.
        made = not exact and f'"{start}"' in (ROOT / file).read_text("utf-8")
        yield from (f"{file}:{name}" for name in exact + [start] * made)
        return
    suite, _, start = test.partition(" ")
    for name in registry.load(f"tests.{suite}"):
        if name.startswith(start):
            yield f"{suite} {name}"


def promises() -> Iterator[tuple[str, str, list[str]]]:
    """Each entry's kind, its words, and what holds it."""
    for one in (*PROMISES["contract"], *PROMISES["repaired"]):
        held = [held for test in one["tests"] for held in held_by(test)]
        yield one.get("clause", "repaired"), one["says"], held
    for one in PROMISES["claim"]:
        yield one["page"], one["says"], [*held_by(one["test"])]


def main():
    print("| promise | says | held by |\n|---|---|---|")
    for kind, says, tests in promises():
        more = [f"and {len(tests) - _SHOWN} more"] * (len(tests) > _SHOWN)
        print(f"| {kind} | {says.replace('|', '/')} | {', '.join([*tests[:_SHOWN], *more])} |")


if __name__ == "__main__":
    main()
