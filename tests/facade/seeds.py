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
from tests.facade import coverage, names

PAGE = ROOT / "docs" / "tf-distribute-names.md"
HEAD = """# The names and examples of tf.distribute

<!-- Written by `python -m tests.facade.seeds`. Do not edit. -->

Code of a page of `tf.distribute` runs here, changed in nothing but the import, or raises an error
that says what to write instead. A test makes this list from the installed TensorFlow, and fails
where it has a name or an argument that is neither here nor refused with advice. What a name does
is on [The behaviours of tf.distribute](tf-distribute-behaviours.md).
"""
# Cases that run on JAX, and where there is no TPU strategy show that an error says what to use.
ON_JAX = ("docstrings.logical_devices", "docstrings.the_way_to_a_tpu_strategy")
# Examples of what is refused: their cases show that the error says what to write instead.
REFUSED = """
ClusterResolver_task_id 1
ClusterResolver_task_type 1
DistributedDatasetInterface 3
DistributedIteratorInterface_get_next_as_optional 1
GCEClusterResolver 1
HierarchicalCopyAllReduce 1
KubernetesClusterResolver 1
KubernetesClusterResolver___init__ 1
NcclAllReduce 1
ReductionToOneDevice 1
SimpleClusterResolver 1
StrategyBase_cluster_resolver 1
TPUClusterResolver_get_tpu_system_metadata 1
UnionClusterResolver 1
UnionClusterResolver 2
"""


def written() -> str:
    """Returns the page's text; TensorFlow is Keras's backend."""
    listed = names.listed()
    here = sum(one.advice is None for one in listed)
    parts = [
        HEAD,
        "## Names\n",
        f"Of {len(listed)} names of modules, classes and arguments, `tf.compat.v1` and `tf.tpu` "
        f"included, {here} are here as they are. The others:\n",
        *("| of | name | what to write |", "|---|---|---|", *_names(listed), ""),
        "## Names of 2018, and of TensorFlow 1\n",
        "Those that TensorFlow no longer has, and that scripts still use: a tower is a replica.\n",
        *("| of | name | what to write |", "|---|---|---|", *_earlier(listed), ""),
        "## Examples\n",
        f"Of {len(coverage.cases())} examples of the docstrings each has a case in "
        "`tests/facade/`, which holds its facts on each backend, in our own words. **says**: an "
        "error says what to write, or which backend to use, and the case shows it.\n",
        f"| of | example | case | {' | '.join(map(NAMES.get, registry.BACKENDS))} |",
        *("|---|---|---|---|---|---|", *_examples(), ""),
    ]
    for example, reason in coverage.NOT_COVERED.items():
        place, _, number = example.rpartition("__")
        parts.append(f"- `{place}` {number} is left out: {reason}.")
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
    rows: dict[tuple[str, str, bool], list[str]] = {}
    refused = REFUSED.strip().splitlines()
    for example, case in coverage.cases().items():
        place, _, number = example.rpartition("__")
        is_refused = f"{place} {number}" in refused
        rows.setdefault((place, case.name, is_refused), []).append(number)
    for (place, name, is_refused), numbers in sorted(rows.items()):
        marks = [
            "says" if is_refused or (name in ON_JAX and backend != "jax") else "yes"
            for backend in registry.BACKENDS
        ]
        yield f"| `{place}` | {', '.join(numbers)} | {name} | {' | '.join(marks)} |"


if __name__ == "__main__":
    os.environ["KERAS_BACKEND"] = "tensorflow"
    PAGE.write_text(written(), encoding="utf-8")
