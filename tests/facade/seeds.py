"""The page of the seeds: names and examples of tf.distribute's pages, and what is here.

    python -m tests.facade.seeds

writes docs/tf-distribute-names.md from the installed TensorFlow, the table of names and the cases.
"""

import os
from collections.abc import Iterator

from kerasdist.core import earlier_names
from tests.conformance import registry
from tests.conformance.runner import ROOT
from tests.conformance.support import NAMES
from tests.facade import coverage, examples, names
from tests.facade.examples_known import EXCEPTIONS

PAGE = ROOT / "docs" / "tf-distribute-names.md"
HEAD = """# The names and examples of tf.distribute

<!-- Written by `python -m tests.facade.seeds`. Do not edit. -->

Code from the documentation of `tf.distribute` either runs with kerasdist, with only the import
changed, or raises an error that says what to write instead. A test makes this list from the
installed TensorFlow. The test fails if TensorFlow has a name or an argument that kerasdist neither
has nor refuses with advice. [The behaviours of tf.distribute](tf-distribute-behaviours.md) says
what the names do.
"""


def written() -> str:
    """Returns the page's text; TensorFlow is Keras's backend."""
    listed = names.listed()
    here = sum(one.advice is None for one in listed)
    parts = [
        HEAD,
        "## Names\n",
        f"`tf.distribute`, `tf.compat.v1` and `tf.tpu` have {len(listed)} names of modules, "
        f"classes and arguments. kerasdist has {here} of these names. The others are:\n",
        *("| of | name | what to write |", "|---|---|---|", *_names(listed), ""),
        "## Names of 2018, and of TensorFlow 1\n",
        'TensorFlow no longer has these names, but some scripts still use them. "Tower" is the '
        "old word for a replica.\n",
        *("| of | name | what to write |", "|---|---|---|", *_earlier(listed), ""),
        "## Examples\n",
        "A test (`tests/facade/examples.py`) reads the examples of the docstrings in the installed "
        "TensorFlow, and runs each example with only the import changed. On every backend the "
        "names of `tf.distribute` and `tf.tpu` are those of kerasdist, and `tf.keras` is Keras. On "
        "JAX and PyTorch `tf.function` is `kerasdist.function`, `tf.Variable` is `keras.Variable`, "
        "and operations such as `tf.constant` are those of `keras.ops`. Names of GPUs become names "
        "of CPU devices. For each example, the test case in the third column checks the same "
        "behavior.\n",
        "**yes** means that the example runs, and returns the values that its docstring shows; a "
        "tensor is printed in its framework's own form. **says** means that an error says what to "
        "write, or which backend to use. A "
        f"**number** refers to a reason below the table. {' '.join(map(_counts, NAMES))}\n",
        f"| of | example | case | {' | '.join(NAMES.values())} |",
        *("|---|---|---|---|---|---|", *_examples(), ""),
        *(f"{number}. {reason}" for number, reason in enumerate(_reasons(), 1)),
        "\nThe examples of these files are not run:\n",
        *("| file of `tensorflow/python/distribute` | examples | reason |", "|---|---|---|"),
        *(
            f"| `{file}.py` | {len(coverage.examples(file))} | {reason} |"
            for reason, files in coverage.OUTSIDE.items()
            for file in files
        ),
    ]
    return "\n".join([*parts, ""])


def _names(listed: list[names.Name]) -> Iterator[str]:
    rows: dict[tuple[str, str], list[str]] = {}
    for one in listed:
        if one.advice is None:
            continue
        of = one.place.rpartition(".")[2]
        if of.endswith("Strategy") and not one.name.endswith("="):
            of = "Strategy"  # what all of them have
        elif of[:1].islower() and not one.name.endswith("="):
            of = one.place.replace("tf.compat.v1", "tf")
        own = rows.setdefault((of, one.advice), [])
        if one.name not in own:
            own.append(one.name)
    for (of, advice), own in rows.items():
        yield f"| `{of}` | {', '.join(f'`{name}`' for name in own)} | {advice} |"


def _earlier(listed: list[names.Name]) -> Iterator[str]:
    known = {one.name for one in listed}
    for table in (earlier_names.RENAMED, earlier_names.ADVICE):
        for of, entries in table.items():
            for keys, said in entries.items():
                own = [f"`{name}`" for name in keys.split() if name not in known]
                write = said if table is earlier_names.ADVICE else f"the same; now `{said}`"
                if said.endswith(".") and table is earlier_names.RENAMED:
                    write = f"the same; now of `strategy.{said[:-1]}`"
                if own:
                    yield f"| `{of}` | {', '.join(own)} | {write} |"


def _examples() -> Iterator[str]:
    rows: dict[tuple[str, str, tuple[str, ...]], list[str]] = {}
    cases = {example: case.name for example, case in coverage.cases().items()}
    for example, case in (cases | dict.fromkeys(coverage.NOT_COVERED, "")).items():
        place, _, number = example.rpartition("__")
        marks = tuple(_mark(f"{place} {number}", backend) for backend in registry.BACKENDS)
        rows.setdefault((place, case, marks), []).append(number)
    for (place, case, marks), numbers in sorted(rows.items()):
        yield f"| `{place}` | {', '.join(numbers)} | {case} | {' | '.join(marks)} |"


def _counts(backend: str) -> str:
    every = [example.rpartition("__") for example in (*coverage.cases(), *coverage.NOT_COVERED)]
    marks = [_mark(f"{place} {number}", backend) for place, _, number in every]
    run, say = marks.count("yes"), marks.count("says")
    return (
        f"On {NAMES[backend]}, {run} of {len(marks)} examples run, and {say} raise an error that "
        "says what to write."
    )


def _mark(example: str, backend: str) -> str:
    known = examples.exceptions().get((example, backend))
    if known is None:
        return "yes"
    return str(_reasons().index(known.reason) + 1) if known.reason else "says"


def _reasons() -> list[str]:
    return [known.reason for known in EXCEPTIONS if known.reason]


if __name__ == "__main__":
    os.environ["KERAS_BACKEND"] = "tensorflow"
    PAGE.write_text(written(), encoding="utf-8")
