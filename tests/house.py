"""Prints how large the package is, which imports go in a circle, and what a step of `fit` calls.

    python -m tests.house

The figures, and where they are to come, are those of the redesign that began in November 2026
(docs/adr/0048-ceilings.md).
"""

import ast
import io
import json
import tokenize
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import networkx

from tests.fresh import run_python
from tests.unit.test_layers import (
    FILES,
    PACKAGE,
    imported,
    imported_at_module_level,
    module_of,
    parse,
)

FRAMEWORKS = ("tensorflow", "jax", "torch")


@dataclass(frozen=True)
class Figure:
    """A figure of the package, with the most that a test allows and with a target.

    A ceiling is what the package has reached: whoever makes it smaller lowers it. Only a feature
    raises it, by what it adds: `ADDED`.
    """

    name: str
    ceiling: int
    target: int


# What has been added to the 29,510 lines since the layout was done.
ADDED = {
    "elastic jobs": 226,
    "machines that join": 291,
    "draws for the global batch": 113,
    "sharded within a machine": 123,
    "a record of collectives": 148,
    "the plan of groups": 108,
    "steps that do not grow with the workers": 30,
    "constructors in place of attributes": 24,
    "sizes that the types of data say": 66,
    "backups as often as pays": 107,
    "backups in memory": 182,
    "a warm process for restarts": 218,
    "votes that are asked for": 74,
    "passes of a call": 445,
    "stopped workers": 23,
    "all optimizers, and objects of callbacks, in backups": 88,
    "the data of validation, in backups": 36,
    "stacked batches in the check": 13,
    "what backups say that they lack": 11,
    "one target of several outputs": 10,
    "iterators, and several axes, of tf.distribute": 24,
    "globals that a lambda reads, and types that have no mean": 28,
    "losses of each example through BatchNormalization": 19,
    "what callbacks hold twice, and optimizers anywhere, in backups": 90,
    "activity regularizers that are functions": 21,
    "numbers that replicas of different sizes return": 7,
    "the frameworks' own state in the check, and buffers that a step changes": 57,
    "sums that a step reads": 12,
    "restarts of models without Input, and of checkpoints by batches": 5,
    "more code that the check sees": 7,
    "draws of one worker alone in a callback": 12,
    "stateful layers refused, weights of NumPy with a mask": 12,
    "tensors that layers keep as attributes": 87,
    "metrics of layers, and what layers keep, in passes": 14,
    "batches that the check's steps change, and callbacks' objects that are built late": 6,
    "workers that make variables, or reduce, alone": 5,
    "arguments of predict_to in another order": 5,
    "batches that threads read past an epoch": 8,
    "no graph by TensorBoard on workers": 2,
    "steps of an execution in one program, on JAX": 90,
    "versions that are too old, Keras twice, and what is gone, by doctor": 129,
    "what is not public is declared, and costs its feature alone (ADR 106)": 1493,
    "what code keeps in Python, by replica (ADR 107)": 433,
    "what the public tests of tf.distribute rely on": 92,
    "functions that run eagerly, and rows of sparse products there": 57,
    "state that a failed step has consumed, and keys of a LayoutMap that are nobody's": 38,
    "names of tf.distribute of any year, options that say where they have no effect": 446,
    "topologies and assignments of TPUs": 130,
    "a user's own tf.distribute strategy beside ours, and losses that differ in weight": 29,
    "what is passed of Keras's own distribution": 10,
    "weights gathered for each use, on JAX (ADR 108)": 317,
    "whole gradients that end with their sums, and plans without values (ADR 109)": 89,
    "what a device holds of a model, as a table, and of a variable on Keras 3.12": 78,
    "layouts by rule, why, and maps in plans (ADR 111)": 115,
    "copies that differ or lie on several devices, in update; layers made in each step": 47,
    "weights of a file that is larger than a device, drawn late and read by shards": 121,
    "updates in groups, buckets from the first step on, moments by one function": 119,
    "the largest number of rows finds itself": 321,
    "files that do not fit, divided integers, exports in jobs": 307,
    "the optimizer's variables on the host, layouts of outputs": 377,
    "maps by DTensor on PyTorch's workers": 623,
    "checkpoints of Orbax and of torch.distributed.checkpoint, by blocks": 490,
    "moments with a written gradient, and short steps on one core": 46,
    "outputs laid out by DTensor": 39,
    "what a full disk does not destroy, and names": 80,
    "offload in plans": 10,
    "errors of checkpoints on all workers, and masks of outputs that are laid out": 48,
    "metrics that go with the last gradients": 53,
    "sums that code outside of the scope assigns": 7,
    "replicas in the calling thread, sums that a worker polls for, own cores": 81,
    "what compiled code assigns, and workers that end before they are connected": 10,
}

# What the tables of internals add beside their lines (ADR 106), and what looks for Python's state
# in users' code (ADR 107): the types of what Keras, the frameworks and users do not declare, and in
# a first fit the functions that look for each part as it is used. And what came after: the names of
# tf.distribute, JAX's gathers, variables of a plan, layouts as a table. One walk through attributes
# and one through code, which several functions call, are two functions more and 24 lines fewer.
DECLARED = {
    "files": 28,
    "files under 50 lines": 0,
    "mentions of Any": 353,
    "jax": 49,
    "tensorflow": 66,
    "torch": 48,
}

# Files of tests that issues after the redesign began have added; they are counted beside it.
TESTS_BESIDE = {
    "names of tf.distribute, of any year": (
        "facade/cases_docstrings.py",
        "facade/cases_examples.py",
        "facade/examples*.py",
        "facade/names.py",
        "facade/*seeds.py",
        "unit/test_partitions.py",
    ),
    "larger than a device": (
        "conformance/cases_checkpoints.py",
        "conformance/cases_offload.py",
        "conformance/cases_sharding.py",
        "facade/cases_jax/planned.py",
        "keras_suites/hub/layout_script.py",
        "multiprocess/cases_layout_maps.py",
        "multiprocess/cases_offload_workers.py",
        "multiprocess/cases_sharded_adapters.py",
        "multiprocess/cases_sharded_models.py",
        "multiprocess/cases_worker_checkpoints.py",
        "unit/backends/test_weight_files.py",
    ),
    "defects found from outside": (
        "conformance/*python_state.py",
        "conformance/cases_copies.py",
        "conformance/cases_lookups.py",
        "conformance/cases_overrides.py",
        "conformance/cases_products.py",
        "conformance/cases_step_logs.py",
        "conformance/threads.py",
        "facade/*behaviours.py",
        "facade/behaviours/*.py",
        "facade/cases_in_force.py",
        "in_scope/*.py",
        "multiprocess/cases_in_scope.py",
        "multiprocess/cases_outside_of_the_scope.py",
        "multiprocess/cases_sharded_layers.py",
        "unit/callbacks/test_model_checkpoint.py",
        "unit/agreement/test_measures.py",
    ),
    "versions and newer Keras": (
        "conformance/cases_newer_keras.py",
        "docs/test_launchers.py",
        "examples/test_trackers.py",
        "internals.py",
        "unit/backends/test_framework_internals.py",
        "unit/backends/test_tensorflow_private.py",
        "unit/input/test_adapters.py",
        "unit/test_*internals.py",
        "unit/test_keras_objects.py",
        "versions/*.py",
    ),
    "as fast as DDP": ("conformance/cases_end_of_a_step.py", "multiprocess/cases_torch_metrics.py"),
    "thousands of workers": (
        "multiprocess/order_script.py",
        "unit/backends/test_torch_scale.py",
        "unit/backends/torch_ranks.py",
        "unit/job/simulated_workers.py",
        "unit/job/test_collectives.py",
        "unit/job/test_scale.py",
    ),
    "accelerators": (
        "accelerators/*matrix.py",
        "accelerators/test_torch_waits.py",
        "ahead_of_time/*golden.py",
        "unit/cli/plan/*published.py",
        "unit/cli/plan/test_groups.py",
    ),
    "jobs that change size": (
        "conformance/cases_passes.py",
        "multiprocess/*elastic*.py",
        "multiprocess/*memory*.py",
        "multiprocess/hosts.py",
        "multiprocess/test_join.py",
        "multiprocess/test_warm.py",
        "unit/callbacks/test_interval.py",
        "unit/callbacks/test_memory.py",
        "unit/cli/launch/test_elastic.py",
    ),
}

FIGURES = (
    Figure("lines of code", 24_992 + sum(ADDED.values()), 23_500),
    Figure("files", 233 + DECLARED["files"], 250),
    Figure("files under 50 lines", 20 + DECLARED["files under 50 lines"], 20),
    Figure("files over 700 lines", 0, 0),
    Figure("modules beside the packages", 5, 6),
    Figure("files in the largest folder", 14, 14),
    Figure("circles of imports, those for types included", 0, 0),
    Figure("mentions of Any", 2_294 + DECLARED["mentions of Any"], 2_600),
    Figure("lines of tests", 33_000, 33_000),
)
# On two replicas (`tests.hops`).
FIGURES_OF_FIT = {
    "jax": (
        Figure("calls in a step", 17, 25),
        Figure("functions of a first fit", 141 + DECLARED["jax"], 110),
        Figure("their files", 32 + DECLARED["files"], 25),
        Figure("patches of Keras", 30, 30),
    ),
    "tensorflow": (
        Figure("calls in a step", 5, 7),
        Figure("functions of a first fit", 276 + DECLARED["tensorflow"], 180),
        Figure("their files", 44 + DECLARED["files"], 30),
        Figure("patches of Keras", 30, 30),
    ),
    "torch": (
        Figure("calls in a step", 398, 400),
        Figure("functions of a first fit", 228 + DECLARED["torch"], 190),
        Figure("their files", 40 + DECLARED["files"], 30),
        Figure("patches of Keras", 30, 30),
    ),
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


def largest_folders() -> list[tuple[str, int]]:
    """The folders of the package, and their lines of code, the largest first."""
    found: dict[str, int] = {}
    for path in FILES:
        folder = str(path.parent.relative_to(PACKAGE))
        found[folder] = found.get(folder, 0) + lines_of_code(path)
    return sorted(found.items(), key=lambda each: -each[1])


def measured() -> dict[str, int]:
    """What the package has of each of `FIGURES`."""
    folders = Counter(path.parent for path in FILES)
    sizes = [len(path.read_text(encoding="utf-8").splitlines()) for path in FILES]
    values = (
        sum(map(lines_of_code, FILES)),
        len(FILES),
        sum(size < 50 for size in sizes),
        sum(size > 700 for size in sizes),
        folders[PACKAGE],
        max(folders.values()),
        len(circles(types=True)),
        sum(
            isinstance(node, ast.Name) and node.id == "Any"
            for path in FILES
            for node in ast.walk(parse(path))
        ),
        lines_of_tests("**/*.py") - sum(tests_beside().values()),
    )
    return {figure.name: value for figure, value in zip(FIGURES, values, strict=True)}


def lines_of_tests(*patterns: str) -> int:
    """The lines of the files of tests that match."""
    files = {path for pattern in patterns for path in Path(__file__).parent.glob(pattern)}
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)


def tests_beside() -> dict[str, int]:
    """The lines of tests that are counted beside the others, by what they are for."""
    return {name: lines_of_tests(*patterns) for name, patterns in TESTS_BESIDE.items()}


def measured_of_fit(backend: str) -> dict[str, int]:
    """What a backend has of each of `FIGURES_OF_FIT`."""
    environment = {"KERAS_BACKEND": backend, "KERASDIST_CPU_DEVICES": "2", "KERASDIST_CHECK": "off"}
    return json.loads(run_python("-m", "tests.hops", **environment).splitlines()[-1])


def above_ceilings(figures: Iterable[Figure], now: Mapping[str, int]) -> dict[str, int]:
    """The figures that are above their ceilings."""
    return {one.name: now[one.name] for one in figures if now[one.name] > one.ceiling}


def circles(*, types: bool) -> list[list[str]]:
    """The sets of modules that import each other, or for types alone, the largest first."""
    modules = {module_of(path): path for path in FILES}
    graph: Any = networkx.DiGraph()
    for module, path in modules.items():
        tree = parse(path)
        # As in Python, `from package import module` imports the module, and its package only if
        # that has no such module.
        graph.add_edges_from(
            (module, known)
            for name in (imported(tree) if types else imported_at_module_level(tree))
            for known in [name if name in modules else name.rpartition(".")[0]]
            if known in modules and known != module and not module.startswith(f"{known}.")
        )
    rings: Any = networkx.strongly_connected_components(graph)
    return sorted((sorted(ring) for ring in rings if len(ring) > 1), key=len, reverse=True)


def main():
    print(f"{'':46}   now  ceiling  target")
    show(FIGURES, measured())
    for backend, figures in FIGURES_OF_FIT.items():
        print(f"{backend}:")
        show(figures, measured_of_fit(backend))
    for name, size in tests_beside().items():
        print(f"  lines of tests beside: {name:33}{size:6}")
    for ring in circles(types=True):
        print(f"  circle: {' '.join(ring)}")
    for folder, size in largest_folders():
        print(f"  lines of code in {folder:27}{size:6}")


def show(figures: Iterable[Figure], now: Mapping[str, int]):
    for figure in figures:
        print(f"{figure.name:46}{now[figure.name]:6}{figure.ceiling:9}{figure.target:8}")


if __name__ == "__main__":
    main()
