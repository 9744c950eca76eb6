"""Which examples of tf.distribute's docstrings have a case, and why others have none.

    python -m tests.facade.coverage

finds the examples in the installed TensorFlow, without importing it, and prints what covers each.
An example is a block between ``` marks, or an unbroken run of lines that begins with ``>>>``.
"""

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path

from tests.conformance import registry

FILES = (
    "distribute_lib",
    "mirrored_strategy",
    "values",
    "tpu_strategy",
    "central_storage_strategy",
    "one_device_strategy",
    "input_lib",
)
THEME = "docstrings."

RESOLVER = "TensorFlow's own start of TPU hardware by a resolver; no other backend has it"

# Examples that stay without a case, by the reason.
NOT_COVERED = {
    "a strategy for the whole process, for notebooks, is not in the facade: a scope says which": (
        "distribute_lib__experimental_set_strategy__1",
    ),
    "tells workers from parameter servers, which synchronous training does not have": (
        "distribute_lib__StrategyBase_cluster_resolver__1",
    ),
    "a V1 graph-session call for optimizers of V1; V2 took it out": (
        "distribute_lib__StrategyExtendedV1_non_slot_devices__1",
    ),
    RESOLVER: (
        "tpu_strategy__TPUStrategyV2__1",
        "tpu_strategy__TPUStrategyV2__6",
        "tpu_strategy__TPUStrategy__1",
        "tpu_strategy__TPUStrategyV1_run__1",
    ),
}


def folder() -> Path:
    """Where the installed tf.distribute stands."""
    found = importlib.util.find_spec("tensorflow")
    if found is None or found.origin is None:
        raise SystemExit(
            "Expected TensorFlow, whose docstrings are read. Received: none installed."
        )
    return Path(found.origin).parent / "python" / "distribute"


def examples(file: str) -> list[str]:
    """Names of a file's examples: file, path of the class or function, number in its docstring."""
    tree = ast.parse((folder() / f"{file}.py").read_text("utf-8"))
    return [
        f"{file}__{path}__{number}"
        for path, text in docstrings(tree, ())
        for number in range(1, count(text) + 1)
    ]


def docstrings(node: ast.AST, path: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Paths and docstrings of everything below a node that can have one."""
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
        yield "_".join(path) or "module", ast.get_docstring(node) or ""
    for child in ast.iter_child_nodes(node):
        name = child.name if isinstance(child, ast.ClassDef | ast.FunctionDef) else None
        yield from docstrings(child, (*path, name) if name else path)


def count(text: str) -> int:
    """How many examples a docstring has."""
    found, fenced, prompted = 0, False, False
    for line in text.splitlines():
        words = line.strip()
        if words.startswith("```"):
            found += not fenced
            fenced, prompted = not fenced, False
        elif not fenced:
            begins = words.startswith(">>>") and not prompted
            found += begins
            prompted = bool(words) and (prompted or begins)
    return found


def cases() -> dict[str, registry.Case]:
    """The cases of examples, by the example."""
    found = registry.load("tests.facade")
    return {name[len(THEME) :]: one for name, one in found.items() if name.startswith(THEME)}


def reasons() -> dict[str, str]:
    """Why an example has no case, by the example."""
    return {name: why for why, names in NOT_COVERED.items() for name in names}


def main() -> None:
    covering, why = cases(), reasons()
    total = covered = 0
    for file in FILES:
        names = examples(file)
        have = [name for name in names if name in covering]
        print(f"\n{file}.py: covered {len(have)} of {len(names)}")
        for name in names:
            if name in covering:
                print(f"  {name}: {THEME}{name}, {', '.join(covering[name].backends)}")
            else:
                print(f"  {name}: NOT COVERED, {why.get(name, 'and nobody said why')}")
        total, covered = total + len(names), covered + len(have)
    print(f"\nall: covered {covered} of {total}")


if __name__ == "__main__":
    main()
