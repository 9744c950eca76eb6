"""Keras's own tests with a strategy in scope, beside plain Keras's outcomes.

    python -m tests.keras_suites.suite report           # runs under the strategy, writes the page
    python -m tests.keras_suites.suite run jax          # one backend, prints what differs
    python -m tests.keras_suites.suite run jax optimizers/sgd_test.py     # of these tests
    python -m tests.keras_suites.suite run --keras FOLDER                 # of another Keras

Nothing of Keras is copied: the installed Keras brings its tests, and they run in a fresh process
per backend, with ``tests.keras_suites.plugin`` around each test. Those that do not pass run once
more without a strategy: what plain Keras passes must pass, but for the tests in ``exceptions.py``.
A Keras that brings no tests, as the nightly, gets those of the installed one, or of ``--tests``.
"""

import argparse
import importlib.metadata
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.environment import CPU_DEVICES, QUIET, ROOT, path_of_users, values
from tests.keras_suites.outcomes import Comparison, Outcome

BACKENDS = ("tensorflow", "jax", "torch")
NAMES = {"tensorflow": "TensorFlow", "jax": "JAX", "torch": "PyTorch"}
REPLICAS = 2
PAGE = ROOT / "docs" / "keras_tests.md"
KERAS = importlib.metadata.distribution("keras")
# Where it is installed: tests are named by their paths in it.
INSTALLED = str(KERAS.locate_file(""))
HEAD = f"""# Keras's own tests under a strategy

<!-- Written by `python -m tests.keras_suites.suite report` (`make keras-tests`). Do not edit. -->

The tests that the installed Keras {KERAS.version} brings, every test inside the scope of a \
`kd.MirroredStrategy` of {REPLICAS} CPU devices, beside plain Keras. `make test-everything` runs a \
selection.

| | | plain: passed | skipped | failed | ours: passed | skipped | failed |
|---|---|---|---|---|---|---|---|
"""
PACKAGES = (
    "callbacks",
    "layers/normalization",
    "metrics",
    "models",
    "optimizers",
    "saving",
    "trainers",
)
# What `make test-everything` runs: `fit` and what it calls, and of each other package what a scope
# changes.
SELECTION = (
    "callbacks/early_stopping_test.py",
    "layers/normalization/batch_normalization_test.py",
    "metrics/metric_test.py",
    "metrics/reduction_metrics_test.py",
    "models/sequential_test.py",
    "optimizers/adam_test.py",
    "optimizers/loss_scale_optimizer_test.py",
    "optimizers/sgd_test.py",
    "saving/serialization_lib_test.py",
    "trainers/compile_utils_test.py",
    "trainers/epoch_iterator_test.py",
    "trainers/trainer_test.py",
)
# Trainer's tests take longer than all others: of them TensorFlow has one half, JAX the other one,
# and torch, where they are quick, both.
HALVES = {"tensorflow": 0, "jax": 1}
HALVED = "trainers/trainer_test.py"
# The tests of one process; a single one has its own limit in the plugin.
SECONDS = 3600
# Torch's compiler is what takes a test beyond seconds.
SECONDS_PER_TEST = 300
# The variable that names a folder with the Keras to be tested, in place of the installed one.
FOLDER = "KERAS_SUITES_FOLDER"
# The variable that tells the plugin which file has what to run.
CHOICE = "KERAS_SUITES_CHOICE"


def run(
    backend: str, replicas: int, wanted: Sequence[str] = (), half: int | None = None
) -> dict[str, Outcome]:
    """Runs the tests of ``wanted`` files or names, or all; where one ends the process, goes on.

    ``replicas=0``: plain Keras; ``half``: which one of `HALVED`.
    """
    outcomes: dict[str, Outcome] = {}
    with tempfile.TemporaryDirectory() as folder:
        while True:
            choice = {"replicas": replicas, "wanted": list(wanted), "half": half}
            ended, running, tail = _one_process(backend, choice, Path(folder), outcomes)
            if ended and (outcomes or not replicas):
                return outcomes
            if not running:
                raise RuntimeError(
                    f"Expected pytest to run Keras's tests on {backend}. "
                    f"Received: no test ran. {tail}"
                )
            outcomes[running] = Outcome("died", message=tail)


def _modules(wanted: Sequence[str]) -> list[str]:
    paths = {one.partition("::")[0] for one in wanted} or set(PACKAGES)
    return sorted("keras.src." + path.removesuffix(".py").replace("/", ".") for path in paths)


def _one_process(backend, chosen, folder, outcomes) -> tuple[bool, str, str]:
    lines, choice = folder / "outcomes.jsonl", folder / "choice.json"
    lines.write_text("", "utf-8")
    choice.write_text(
        json.dumps({**chosen, "known": sorted(outcomes), "outcomes": str(lines)}), "utf-8"
    )
    here = os.environ.get(FOLDER, INSTALLED)
    environment = {
        **os.environ,
        "KERAS_BACKEND": backend,
        CHOICE: str(choice),
        "PYTHONPATH": os.pathsep.join([str(ROOT), here, path_of_users()]),
        "PYTEST_ADDOPTS": "",
        **values((*QUIET, *CPU_DEVICES)),
    }
    command = [sys.executable, "-m", "pytest", "-q", "--color=no", "-p", "no:cacheprovider"]
    command += ["-c", os.devnull, "--rootdir", here, "-p", "tests.keras_suites.plugin"]
    command += ["--continue-on-collection-errors"]
    process = subprocess.run(
        [*command, "--pyargs", *_modules(chosen["wanted"])],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=SECONDS,
        check=False,
    )
    running, finished = "", False
    for text in lines.read_text("utf-8").splitlines():
        line = json.loads(text)
        test, outcome = line.pop("test"), line.pop("outcome")
        if outcome == "finished":
            finished = line["exitstatus"] in (0, 1, 2, 5)  # 5: no such test
        elif outcome == "started":
            running = test
        elif test not in outcomes or outcomes[test].outcome == "passed":
            outcomes[test] = Outcome(outcome, **line)
    if running in outcomes:
        running = ""
    return finished, running, process.stdout[-4000:]


def put_together(keras: Path, tests: Path, folder: Path):
    """Puts Keras into a folder, and the tests of another version beside its modules."""
    shutil.copytree(keras / "keras", folder / "keras")
    for one in (tests / "keras").rglob("*_test.py"):
        place = folder / one.relative_to(tests)
        if place.parent.is_dir():
            # So the trainers are called from 3.16 on.
            text = re.sub(r"\b(JAX|TensorFlow|Torch)Trainer as Trainer", "Trainer", one.read_text())
            place.write_text(text)


def compare(backend: str, wanted: Sequence[str] = (), half: int | None = None) -> Comparison:
    ours = run(backend, REPLICAS, wanted, half)
    others = [test for test, one in ours.items() if one.outcome != "passed"]
    return Comparison(backend, ours, run(backend, 0, others) if others else {})


def report() -> bool:
    """Writes docs/keras_tests.md; returns whether nothing is lost."""
    lines = HEAD.splitlines()
    excused, beyond, both, lost = [], [], [], []
    for backend, package in itertools.product(BACKENDS, PACKAGES):
        found = compare(backend, [package])
        print(backend, package, found.counts(), list(found.worse), flush=True)
        row = [f"`{package}`", NAMES[backend], *found.counts()]
        lines.append("| " + " | ".join(map(str, row)) + " |")
        excused += [f"- {NAMES[backend]}, `{t}`: {r}" for t, r in found.excused.items()]
        beyond += [f"- {NAMES[backend]}, `{t}`: {e}" for t, e in found.beyond_plain.items()]
        both += [
            f"- {NAMES[backend]}, `{file}`, {number} of its tests: {error}"
            for (file, error), number in found.failed_by_both.items()
        ]
        lost += [f"- {NAMES[backend]}, `{t}`" for t in found.worse]
    for title, told in (
        ("Exceptions, passed by plain Keras alone:", excused),
        ("Skipped by plain Keras, which has one device, and failed here:", beyond),
        ("Failed by plain Keras, too, on the machine that wrote this page:", both),
        ("Passed by plain Keras alone, to be fixed:", lost),
    ):
        lines += ["", title, "", *told] if told else []
    PAGE.write_text("\n".join(lines) + "\n", "utf-8")
    return not lost


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=("report", "run"))
    parser.add_argument("wanted", nargs="*", help="backends, and tests or the beginnings of names")
    parser.add_argument("--keras", type=Path, help="folder with the Keras to be tested")
    parser.add_argument("--tests", type=Path, help="folder with the Keras whose tests it gets")
    arguments = parser.parse_intermixed_args()
    with tempfile.TemporaryDirectory() as folder:
        if arguments.keras:
            put_together(arguments.keras, arguments.tests or Path(INSTALLED), Path(folder))
            os.environ[FOLDER] = folder
        _report_or_run(arguments)


def _report_or_run(arguments: argparse.Namespace):
    backends = [one for one in arguments.wanted if one in BACKENDS] or BACKENDS
    wanted = [one for one in arguments.wanted if one not in BACKENDS]
    if arguments.command == "report":
        sys.exit(not report())
    else:
        for backend in backends:
            found = compare(backend, wanted)
            print(backend, "passed, skipped, failed; plain and ours:", found.counts())
            for test, message in found.worse.items():
                print(f"{test}\n{message}\n")
            print("no exceptions any more:", found.idle_exceptions)


if __name__ == "__main__":
    main()
