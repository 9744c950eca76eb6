"""Prints docstrings and comments of the package, drawn by chance, to be rated by a reader.

python -m tests.sentences [seed] [count]
"""

import ast
import io
import random
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

from tests.unit.test_layers import FILES, PACKAGE, parse

_FOR_TOOLS = ("type:", "noqa", "pyright", "fmt")
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def docstrings(path: Path) -> Iterator[tuple[str, str]]:
    for node in ast.walk(parse(path)):
        if isinstance(node, _DOCUMENTED) and (text := ast.get_docstring(node)):
            yield f"{getattr(node, 'lineno', 1)} {getattr(node, 'name', '')}", text


def comments(path: Path) -> Iterator[tuple[str, str]]:
    """Comments by the line where each begins; those on lines that follow each other are one."""
    found: list[list[str]] = []
    begins: list[int] = []
    last = 0
    for token in tokenize.generate_tokens(io.StringIO(path.read_text("utf-8")).readline):
        text = token.string.lstrip("# ")
        code = token.line[: token.start[1]].strip()
        if token.type != tokenize.COMMENT or text.startswith(_FOR_TOOLS):
            continue
        line = token.start[0]
        if line != last + 1 or not found:
            found.append([])
            begins.append(line)
        found[-1].append(f"`{code}` # {text}" if code else text)
        last = line
    for line, texts in zip(begins, found, strict=True):
        yield f"{line} #", " ".join(texts)


def main(seed: int = 0, count: int = 150):
    everything = [
        (f"{path.relative_to(PACKAGE)}:{where}", text)
        for path in sorted(FILES)
        for read in (docstrings, comments)
        for where, text in read(path)
    ]
    print(f"{count} of {len(everything)}, seed {seed}")
    sample = random.Random(seed).sample(everything, count)
    for number, (where, text) in enumerate(sample, 1):
        print(f"{number:3}. {where}: {' '.join(text.split())}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
