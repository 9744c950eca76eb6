"""The page of the behaviours: written from the cases, compared with them by a test."""

from collections.abc import Iterator

from tests.conformance import registry
from tests.conformance.runner import ROOT
from tests.conformance.support import NAMES
from tests.facade import case
from tests.facade.behaviours import MODULES, Behaviour, load

PAGE = ROOT / "docs" / "tf-distribute-behaviours.md"
HEAD = """# The behaviours of tf.distribute

<!-- Written by `python -m tests.facade.behaviours`. Do not edit. -->

This page lists the behaviours that the public tests of `tf.distribute` and of Keras 2's \
distribution check. The sentences and the checks are written anew for kerasdist. "yes" means that \
kerasdist behaves like `tf.distribute`. A **number** means that kerasdist behaves differently; a \
note below the table explains the difference. "no meaning" means that the row does not apply to \
the backend. Each row is tested on every backend with "yes" or a number, with two replicas in one \
process (`tests/facade/`). [What works](support.md) lists the tests that compare \
training with one device.
"""
MORE = """## With larger cases

Each row is a test case in `tests/facade/`, with one to three replicas.
"""
# The themes of cases that are about none of tf.distribute's behaviours.
_OTHERS = ("behaviours", "checks", "from_outside")

ELSEWHERE = """## What differs in `fit`

- On JAX `fit` is one program for the global batch. The model's code runs in a single replica \
context, which reports the strategy's number of replicas, but all tensors have the rows of the \
global batch. So `all_reduce` and `all_gather` return their argument. The `"SUM"` of a sum over \
rows, the `"MEAN"` of a mean over rows, and a loss that is divided by the number of replicas are \
therefore the same on each backend. The `"SUM"` of means differs between backends, so reduce means \
by `"MEAN"`.
- On every backend a metric of your own gets the rows of all replicas, and runs in a single \
replica context. Code that runs while Keras builds a model from symbolic inputs also runs in a \
single replica context.
- The check of the first batch also runs the model's code on one device, outside of every strategy.
- Callbacks run outside of the strategy: `kd.get_strategy()` in a callback returns the default \
strategy, as in Keras 3 on `tf.distribute`.
"""


def written() -> str:
    """Returns the page's text."""
    parts = [HEAD]
    for module, behaviours in load().items():
        theme, tests = MODULES[module]
        parts.append(f"## {theme}\n\nSource: `{'`, `'.join(tests.split(', '))}`.\n")
        parts.append("\n".join(_table(behaviours)))
    parts.extend((MORE, "\n".join(_cases()), ELSEWHERE))
    return "\n".join(parts)


def count() -> int:
    """Returns how many rows the page has."""
    return sum(map(len, load().values())) + len(list(_cases())) - 2


def _table(behaviours: list[Behaviour]) -> Iterator[str]:
    notes: list[str] = []
    yield from _head()
    for one in behaviours:
        marks = [_mark(one, backend, notes) for backend in registry.BACKENDS]
        yield f"| {one.says} | {' | '.join(marks)} |"
    yield ""
    for number, note in enumerate(notes, 1):
        yield f"{number}. {note}"
    if notes:
        yield ""


def _mark(one: Behaviour, backend: str, notes: list[str]) -> str:
    if backend not in one.backends:
        return "no meaning"
    note = one.differs.get(backend)
    if note is None:
        return "yes"
    if note not in notes:
        notes.append(note)
    return str(notes.index(note) + 1)


def _cases() -> Iterator[str]:
    yield from _head("| of ")
    for name, one in registry.load("tests.facade").items():
        theme = name.partition(".")[0]
        if one.topic != case.OWN and theme not in _OTHERS:
            marks = ["yes" if each in one.backends else "no meaning" for each in registry.BACKENDS]
            yield f"| {theme.replace('_', ' ')} | {one.title} | {' | '.join(marks)} |"
    yield ""


def _head(first: str = "") -> tuple[str, str]:
    columns = ["", *(NAMES[backend] for backend in registry.BACKENDS)]
    row = f"{first}| {' | '.join(columns)} |"
    return row, "|---" * (row.count("|") - 1) + "|"
