"""Keras's own trainer tests with a strategy in scope, beside plain Keras's outcomes.

    python -m tests.keras_trainer.suite plain            # runs plain Keras, writes plain.json
    python -m tests.keras_trainer.suite report           # runs under the strategy, writes the page
    python -m tests.keras_trainer.suite run jax          # one backend, prints what differs

Nothing of Keras is copied: the installed ``keras/src/trainers/trainer_test.py`` runs in a fresh
process a backend, with ``tests.keras_trainer.plugin`` around each test. What plain Keras passes
must pass under the strategy, but for the tests in ``exceptions.py``.
"""

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.environment import CPU_DEVICES, QUIET, values
from tests.keras_trainer.exceptions import EXCEPTIONS

BACKENDS = ("tensorflow", "jax", "torch")
NAMES = {"tensorflow": "TensorFlow", "jax": "JAX", "torch": "PyTorch"}
REPLICAS = 2
ROOT = Path(__file__).resolve().parents[2]
PLAIN = Path(__file__).parent / "plain.json"
PAGE = ROOT / "docs" / "keras_trainer_tests.md"
MODULE = "keras.src.trainers.trainer_test"
# All of a backend's tests together; a single one has its own limit in the plugin.
SECONDS = 1800
# Torch's compiler is what takes a test beyond seconds.
SECONDS_PER_TEST = 240


@dataclass(frozen=True)
class Outcome:
    """``passed``, ``failed``, ``skipped``, or ``died``: the process ended under it."""

    outcome: str
    seconds: float = 0.0
    message: str = ""


def run(backend: str, replicas: int) -> dict[str, Outcome]:
    """Runs all tests; where one ends the process, the rest go on in another."""
    outcomes: dict[str, Outcome] = {}
    with tempfile.TemporaryDirectory() as folder:
        while True:
            finished, running, tail = _one_process(backend, replicas, Path(folder), outcomes)
            if finished:
                return outcomes
            if not running:
                raise RuntimeError(
                    f"Expected pytest to run {MODULE} on {backend}. Received: no test ran. {tail}"
                )
            outcomes[running] = Outcome("died", message=tail)


def _one_process(backend, replicas, folder, outcomes) -> tuple[bool, str, str]:
    lines = folder / "outcomes.jsonl"
    lines.unlink(missing_ok=True)
    known = folder / "known.json"
    known.write_text(json.dumps(sorted(outcomes)), "utf-8")
    environment = {
        **os.environ,
        "KERAS_BACKEND": backend,
        "KERAS_TRAINER_REPLICAS": str(replicas),
        "KERAS_TRAINER_OUTCOMES": str(lines),
        "KERAS_TRAINER_KNOWN": str(known),
        "KERAS_TRAINER_SECONDS_PER_TEST": str(SECONDS_PER_TEST),
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "PYTEST_ADDOPTS": "",
        **values((*QUIET, *CPU_DEVICES)),
    }
    command = [sys.executable, "-m", "pytest", "-q", "--color=no", "-p", "no:cacheprovider"]
    command += ["-c", os.devnull, "--rootdir", str(folder), "-p", "tests.keras_trainer.plugin"]
    process = subprocess.run(
        [*command, "--pyargs", MODULE],
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
    for text in lines.read_text("utf-8").splitlines() if lines.exists() else ():
        line = json.loads(text)
        test, outcome = line.pop("test"), line.pop("outcome")
        if outcome == "finished":
            finished = line["exitstatus"] in (0, 1)
        elif outcome == "started":
            running = test
        elif test not in outcomes or outcomes[test].outcome == "passed":
            outcomes[test] = Outcome(outcome, **line)
    if running in outcomes:
        running = ""
    return finished, running, process.stdout[-4000:]


def keras_version() -> str:
    return importlib.metadata.version("keras")


def plain_outcomes(backend: str) -> dict[str, str]:
    """Plain Keras's outcome a test: recorded, or run now where this Keras is not recorded."""
    recorded = json.loads(PLAIN.read_text("utf-8")) if PLAIN.exists() else {}
    version = keras_version()
    if version in recorded and backend in recorded[version]:
        groups = recorded[version][backend]
        return {test: outcome for outcome, tests in groups.items() for test in tests}
    return {test: one.outcome for test, one in run(backend, 0).items()}


def record_plain(backends) -> None:
    """Writes ``plain.json``: a version of Keras, a backend, an outcome, its tests."""
    recorded = json.loads(PLAIN.read_text("utf-8")) if PLAIN.exists() else {}
    for backend in backends:
        groups: dict[str, list[str]] = {}
        for test, one in sorted(run(backend, 0).items()):
            groups.setdefault(one.outcome, []).append(test)
        recorded.setdefault(keras_version(), {})[backend] = groups
        print(backend, {outcome: len(tests) for outcome, tests in groups.items()}, flush=True)
        PLAIN.write_text(json.dumps(recorded, indent=1, sort_keys=True) + "\n", "utf-8")


@dataclass(frozen=True)
class Comparison:
    backend: str
    plain: dict[str, str]
    ours: dict[str, Outcome]

    @property
    def worse(self) -> dict[str, str]:
        """What plain Keras passes and we don't, without the named exceptions."""
        excused = EXCEPTIONS.get(self.backend, {})
        return {
            test: f"{one.outcome}: {one.message}"
            for test, one in self._lost().items()
            if test not in excused
        }

    @property
    def idle_exceptions(self) -> list[str]:
        """Exceptions that are none any more: the list must not outlive its reasons."""
        return sorted(set(EXCEPTIONS.get(self.backend, {})) - set(self._lost()))

    @property
    def beyond_plain(self) -> dict[str, str]:
        """What fails here and plain Keras did not run, two devices being one more than it had."""
        return {
            test: next((s[2:].strip() for s in one.message.splitlines() if s[:2] == "E "), "")
            for test, one in sorted(self.ours.items())
            if one.outcome not in ("passed", "skipped") and self.plain.get(test) != "passed"
        }

    def _lost(self) -> dict[str, Outcome]:
        missing = Outcome("missing", message="plain Keras ran it, we did not")
        found = {test: self.ours.get(test, missing) for test in self.plain}
        return {
            test: one
            for test, one in found.items()
            if self.plain[test] == "passed" and one.outcome != "passed"
        }

    def counts(self, outcome: str) -> tuple[int, int]:
        ours = [one.outcome for one in self.ours.values()]
        return list(self.plain.values()).count(outcome), ours.count(outcome)

    @property
    def seconds(self) -> float:
        return sum(one.seconds for one in self.ours.values())


def compare(backend: str) -> Comparison:
    return Comparison(backend, plain_outcomes(backend), run(backend, REPLICAS))


def report(backends) -> None:
    """Writes docs/keras_trainer_tests.md."""
    lines = [
        "# Keras's own trainer tests under a strategy",
        "",
        "<!-- Written by `python -m tests.keras_trainer.suite report`. Do not edit. -->",
        "",
        f"The installed Keras {keras_version()}'s `keras/src/trainers/trainer_test.py`, every test "
        f"inside the scope of a `kd.MirroredStrategy` of {REPLICAS} CPU devices, beside plain "
        "Keras on the same machine.",
        "",
        "| | plain: passed | skipped | failed | ours: passed | skipped | failed |",
        "|---|---|---|---|---|---|---|",
    ]
    named, beyond = [], []
    for backend in backends:
        found = compare(backend)
        counts = [found.counts(outcome) for outcome in ("passed", "skipped", "failed")]
        row = [NAMES[backend], *[c[0] for c in counts], *[c[1] for c in counts]]
        lines.append("| " + " | ".join(map(str, row)) + " |")
        named += [f"- {NAMES[backend]}, `{t}`: {r}" for t, r in EXCEPTIONS[backend].items()]
        beyond += [f"- {NAMES[backend]}, `{t}`: {e}" for t, e in found.beyond_plain.items()]
        print(backend, counts, list(found.worse), flush=True)
    if named:
        lines += ["", "Tests that assert how Keras does it, not what it computes:", "", *named]
    if beyond:
        lines += ["", "Tests that plain Keras skips, with one device, and that fail here:", ""]
        lines += beyond
    PAGE.write_text("\n".join(lines) + "\n", "utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=("plain", "report", "run"))
    parser.add_argument("backends", nargs="*", metavar="backend", help=", ".join(BACKENDS))
    arguments = parser.parse_args()
    backends = arguments.backends or BACKENDS
    if arguments.command == "plain":
        record_plain(backends)
    elif arguments.command == "report":
        report(backends)
    else:
        for backend in backends:
            found = compare(backend)
            print(backend, {o: found.counts(o) for o in ("passed", "skipped", "failed")})
            for test, message in found.worse.items():
                print(f"{test}\n{message}\n")
            print("no exceptions any more:", found.idle_exceptions)


if __name__ == "__main__":
    main()
