"""Finds the fenced blocks of README and docs, and what the comments above them say.

`<!-- not run: REASON -->` excepts a block; `<!-- run on: jax tensorflow -->` chooses its backends,
where torch, which compiles nothing, will not do; `<!-- run with keras_hub on: jax -->` those of a
block that `make test-everything` runs, where KerasHub can be imported. A block of Python runs after
those before it on its page. A block of diff is two scripts: with the lines of `-` and with those of
`+`; for one whose packages the tests do not have, `<!-- before not run: REASON -->`.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from textwrap import dedent

from tests.fresh import ROOT
from tests.unit.test_layers import FILES, parse

DEFAULT_BACKEND = "torch"
BACKENDS = ("jax", "torch", "tensorflow")

_MARK = re.compile(r"\s*<!-- (not run|before not run|run on|run with keras_hub on): (.+) -->\s*$")
_WITH_HUB = "run with keras_hub on"
_EXAMPLE = re.compile(r"Example::\n\n((?:    .*\n?|\n)+)")
_NOT_RUN = {
    "compare_with_one_device": "a model and a loss of the reader's; OneDeviceComparison's runs",
    "chief_first": "downloads a file; tests/multiprocess/cases_chief.py calls it",
    "launch": "starts processes; tests/multiprocess/test_launch_function.py does",
    "Launcher": "starts processes; tests/multiprocess/test_launch.py does",
    "run_job": "starts processes; tests/multiprocess/test_launch.py does",
    "JobSpec": "a part of run_job's; tests/unit/cli/launch makes them",
    "python_command": "a part of run_job's; tests/unit/cli/launch makes them",
    "preempt": "installs a signal handler that ends the process",
    "RayJobError": "needs a Ray cluster; tests/integrations/ray runs one",
    "run_on_ray": "needs a Ray cluster; tests/integrations/ray runs one",
    "split_variables": "a part of a script; docs/guides/tpu-pods.md runs it",
    "value_and_grad": "a part of a step; docs/guides/custom-loops.md runs it",
}
_NO_PAGES = ("adr", "gallery")
_ONLY_ON_JAX = ("DeviceAssignment", "Sharding", "TPUClusterResolver", "TPUStrategy")
_ONLY_ON_JAX += ("connect_to_cluster", "initialize_tpu_system")
_FENCE = re.compile(r"(?P<indent>[ ]*)(?P<ticks>```+) ?(?P<language>[\w-]*).*$")


@dataclass(frozen=True)
class Block:
    page: str  # path from the root of the repository
    line: int  # of its first line of text, from 1
    language: str
    text: str
    marks: dict[str, str]

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def backends(self) -> list[str]:
        """The backends on which it runs; none, if it is excepted."""
        if self.language not in ("python", "diff") or self.marks.keys() & {"not run", _WITH_HUB}:
            return []
        return self.marks.get("run on", DEFAULT_BACKEND).split()

    @property
    def with_keras_hub(self) -> list[str]:
        """The backends on which it runs beside KerasHub."""
        return self.marks.get(_WITH_HUB, "").split()

    @property
    def before(self) -> str:
        return self._side("-")

    @property
    def after(self) -> str:
        return self._side("+")

    def _side(self, sign: str) -> str:
        """One of the two scripts of a diff, with its lines where they stand on the page."""
        return "\n".join(
            line[1:] if line[:1] in ("", " ", sign) else "" for line in self.text.split("\n")
        )


def pages() -> list[str]:
    """README, CONTRIBUTING, the integrations' pages and docs.

    Not the decisions, nor the gallery's pages, which are made of scripts that other tests run.
    """
    docs = [path for path in ROOT.glob("docs/**/*.md") if path.parent.name not in _NO_PAGES]
    others = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("integrations/*/README.md")]
    return sorted(str(path.relative_to(ROOT)) for path in [*others, *docs])


def blocks_of(page: str) -> Iterator[Block]:
    lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
    marks: dict[str, str] = {}
    number = 0
    while number < len(lines):
        line = lines[number]
        number += 1
        if mark := _MARK.match(line):
            marks[mark[1]] = mark[2]
        elif fence := _FENCE.match(line):
            first = number
            while lines[number].strip() != fence["ticks"]:
                number += 1
            text = dedent("\n".join(lines[first:number]))
            yield Block(page, first + 1, fence["language"], text, marks)
            number += 1
            marks = {}
        elif line.strip():
            marks = {}


def examples() -> Iterator[Block]:
    """The examples in the docstrings of the package, as the blocks of one page."""
    for path in [*FILES, *(ROOT / "integrations/ray/kerasdist_ray").glob("*.py")]:
        for node in ast.walk(parse(path)):
            if not isinstance(node, ast.ClassDef | ast.FunctionDef):
                continue
            for example in _EXAMPLE.finditer(ast.get_docstring(node) or ""):
                marks = {"not run": _NOT_RUN[node.name]} if node.name in _NOT_RUN else {}
                if node.name in _ONLY_ON_JAX:
                    marks["run on"] = "jax"
                page = f"{path.relative_to(ROOT)}:{node.name}"
                yield Block(page, node.lineno, "python", dedent(example[1]), marks)


def all_blocks() -> list[Block]:
    return [block for page in pages() for block in blocks_of(page)]


if __name__ == "__main__":
    for exception in [*all_blocks(), *examples()]:
        for mark in ("not run", "before not run"):
            if mark in exception.marks:
                print(f"{exception.place}: {mark}: {exception.marks[mark]}")
