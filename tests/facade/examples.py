"""The examples of tf.distribute's docstrings, run as they stand in the installed TensorFlow.

Nothing of them is kept here. Only the import is changed: `tf` has kerasdist in the place of
`tf.distribute` and `tf.tpu`, and `keras` in the place of `tf.keras`. JAX and PyTorch do not compute
with TensorFlow's tensors, so there `tf` also has `kerasdist.function`, `keras.Variable` and
`keras.ops` in the place of TensorFlow's own; `tf.data` stays. The names of GPUs become names of CPU
devices, which is what the suites run on, and a dataset without an end gets one.
"""

import ast
import doctest
import functools
import gc
import io
import json
import linecache
import math
import os
import re
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from tests import environment
from tests.conformance.lazy import kd, keras, ops, tf
from tests.facade import coverage
from tests.facade.examples_known import EXCEPTIONS, PREAMBLES, Known

PARSER = doctest.DocTestParser()
NUMBER = r"\b(?:True|False)\b|[-+]?\d+\.?\d*(?:e[-+]?\d+)?"


@dataclass(frozen=True)
class Block:
    place: str  # the class or function, such as StrategyBase_run
    number: int
    code: str
    # Whether its lines begin with `>>>`, and what they show follows them.
    is_session: bool

    @property
    def name(self) -> str:
        return f"{self.place} {self.number}"


def blocks(file: str) -> Iterator[Block]:
    """The examples of a file, of which `coverage.count` gives the number."""
    tree = ast.parse((coverage.folder() / f"{file}.py").read_text("utf-8"))
    for place, text in coverage.docstrings(tree, ()):
        for number, (is_session, lines) in enumerate(_cut(text), 1):
            yield Block(place, number, textwrap.dedent("\n".join(lines)) + "\n", is_session)


def _cut(text: str) -> Iterator[tuple[bool, list[str]]]:
    found: list[tuple[bool, list[str]]] = []
    is_fenced = is_session = False
    for line in text.splitlines():
        words = line.strip()
        if words.startswith("```"):
            is_fenced, is_session = not is_fenced, False
            if is_fenced:
                found.append((False, []))
            continue
        if not is_fenced:
            if words.startswith(">>>") and not is_session:
                found.append((True, []))
                is_session = True
            is_session = is_session and bool(words)
        if is_fenced or is_session:
            found[-1][1].append(line)
    yield from found


class Changed:
    """A module of which some names are other ones."""

    def __init__(self, module: Any, **names: Any):
        self.__dict__.update(names, _module=module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def changed_import(backend: str) -> Any:
    """What `import tensorflow as tf` becomes."""
    config = Changed(tf.config, experimental_connect_to_cluster=kd.connect_to_cluster)
    found = Changed(tf, distribute=kd, tpu=kd.tpu, keras=keras, config=config)
    # A docstring of today still has the spelling of 2018.
    found.get_replica_context = kd.get_replica_context
    if backend == "tensorflow":
        return found
    return Changed(
        found,
        Variable=keras.Variable,
        VariableAggregation=SimpleNamespace(SUM="sum"),
        VariableSynchronization=SimpleNamespace(ON_READ="on_read"),
        function=kd.function,
        print=kd.print,
        add=ops.add,
        constant=ops.convert_to_tensor,
        identity=ops.copy,
        range=ops.arange,
        reduce_sum=ops.sum,
        reshape=_reshape,
        square=ops.square,
    )


def _reshape(tensor: Any, shape: tuple[int, ...]) -> Any:
    return ops.reshape(tensor, shape)


class Notebook:
    """Runs the examples of one docstring, one after another, in the same namespace."""

    def __init__(self, backend: str):
        self._names = {"tf": changed_import(backend), "np": np, "os": os, "json": json}
        self._names["print"] = self._print
        self._printed = io.StringIO()
        self._printed_at: dict[tuple[str, int], str] = {}

    def run(self, block: Block) -> list[tuple[str, str]]:
        """Runs an example, and returns pairs of what the page shows and what came."""
        with environment.variables():
            for name in (block.place, block.name):
                if name == block.name or block.number == 1:
                    self._execute(PREAMBLES.get(name, ""), f"<before {name}>")
            run = self._session if block.is_session else self._script
            return list(run(_for_the_suites(block.code), block))

    def _session(self, code: str, block: Block) -> Iterator[tuple[str, str]]:
        for example in PARSER.get_examples(code):
            self._printed = io.StringIO()
            value = self._execute(example.source, f"<{block.name}, line {example.lineno + 1}>")
            shown = "" if value is None else repr(value)
            if example.want:
                yield example.want, self._printed.getvalue() + shown

    def _script(self, code: str, block: Block) -> Iterator[tuple[str, str]]:
        """The page shows results in comments: `# result: ...`, and after a call of `print`."""
        name = f"<{block.name}>"
        code = _with_bodies(code).replace("Variable(...)", "Variable(1.0)")
        found: list[tuple[str, str]] = []
        self._names["_shown"] = lambda text, value: found.append((text, str(value)))
        code = re.sub("^( *)# result: (.*)$", r"\1_shown('\2', result)", code, flags=re.MULTILINE)
        self._execute(code, name)
        yield from found
        for number, line in enumerate(code.splitlines(), 1):
            if comment := re.search(r"print\(.*\) +# (.*)$", line):
                yield comment[1], self._printed_at[name, number]

    def _execute(self, code: str, name: str) -> Any:
        """Returns the value of the last line, if that is an expression."""
        linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
        body = ast.parse(code, name).body
        last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
        exec(compile(ast.Module(body, []), name, "exec"), self._names)
        if isinstance(last, ast.Expr):
            return eval(compile(ast.Expression(last.value), name, "eval"), self._names)
        return None

    def _print(self, *values: Any):
        text = " ".join(map(str, values)) + "\n"
        self._printed.write(text)
        caller = sys._getframe(1)
        place = caller.f_code.co_filename, caller.f_lineno
        self._printed_at[place] = self._printed_at.get(place, "") + text


def _for_the_suites(code: str) -> str:
    """Names CPU devices for GPUs, and ends datasets; a GPU beside `CPU:0` is another CPU device."""
    if "'CPU:0', 'GPU:0'" in code:
        code = code.replace("GPU:0", "CPU:1")
    return re.sub("gpu:", "CPU:", code.replace(".repeat()", ".repeat(4)"), flags=re.IGNORECASE)


def _with_bodies(code: str) -> str:
    """Writes `pass` where a comment is all that a function or branch has."""
    lines = textwrap.dedent(code).splitlines()
    made: list[str] = []
    for index, line in enumerate(lines):
        made.append(line)
        indent = len(line) - len(line.lstrip())
        code_after = (one for one in lines[index + 1 :] if re.match(r" *[^#\s]", one))
        following = next(code_after, "")
        opens = line.rstrip().endswith(":") and not line.lstrip().startswith("#")
        if opens and len(following) - len(following.lstrip()) <= indent:
            made.append(" " * (indent + 2) + "pass")
    return "\n".join(made) + "\n"


def data(text: str) -> list[Any]:
    """Numbers and truth values of printed values; of a specification its shapes and types."""
    if "Spec(" in text or "KerasTensor" in text:
        return re.findall(r"shape=(\([^)]*\)), dtype=(?:tf\.)?(\w+)", text)
    text = re.sub(r"\b(?:shape|dtype|path|device|weak_type)=(?:\([^)]*\)|[^\s,>)]+)", "", text)
    text = re.sub(r"'[^']*'|^ *\d+: ", " ", text, flags=re.MULTILINE)
    return [one == "True" if one in ("True", "False") else float(one)
            for one in re.findall(NUMBER, text)]  # fmt: skip


def is_as_shown(shown: str, came: str) -> bool:
    """Whether the values are those of the page, in whatever form the framework prints them."""
    expected, found = data(shown), data(came)
    if shown.startswith("MirroredVariable") and "Mirrored" not in came:
        expected = expected[: len(expected) // 2]  # Keras prints a variable once
    if "PerReplica" in came and "PerReplica" not in shown:
        found = list(dict.fromkeys(found))  # equal in all replicas
    if shown.endswith("..."):
        found = found[: len(expected)]
    return len(expected) == len(found) and all(
        math.isclose(*pair, abs_tol=1e-6) if isinstance(pair[0], float) else pair[0] == pair[1]
        for pair in zip(expected, found, strict=True)
    )


@functools.cache
def exceptions() -> dict[tuple[str, str], Known]:
    """What is known of examples that do not run, by example and backend."""
    return {
        (f"{place} {number}", backend): known
        for known in EXCEPTIONS
        for line in known.examples.split(", ")
        for place, *numbers in [line.split()]
        for number in numbers
        for backend in known.backends.split()
    }


def differences(backend: str) -> Iterator[str]:
    """Runs all examples; yields what is not as the page, or the table of exceptions, says."""
    for file in coverage.FILES:
        notebook, place, is_refused = Notebook(backend), "", False
        for block in blocks(file):
            if block.place != place:
                notebook, place, is_refused = Notebook(backend), block.place, False
            known = exceptions().get((block.name, backend))
            if is_refused and known is not None and not known.reason:
                continue  # it needs what the example before it could not make
            try:
                found = notebook.run(block)
            except Exception as error:  # noqa: BLE001 (whatever comes is compared with the table)
                said = f"{type(error).__name__}: {error}"
                if known is None or not re.search(known.error, said, re.DOTALL):
                    yield f"{block.name}: {said}"
                is_refused = True
                continue
            finally:
                kd.experimental_set_strategy(None)
            if known is not None:
                yield f"{block.name}: it runs. Expected {known.error!r}"
            for shown, came in found:
                if not is_as_shown(shown, came):
                    yield f"{block.name}: expected {shown!r}, received {came!r}"
    gc.collect()  # the end of an iterator of `tf.data` may take as long as the iterator is old
