"""Runs a selection of all tests with many versions, and writes docs/versions.md: ``make versions``.

    python -m tests.versions [--pythons 3.13] [--backends jax] [--sets newest oldest locked nightly]

For each Python that is found here, each backend and each set of versions, in a virtual environment
of its own: import, README's first program, ``kerasdist test`` with two workers, the tripwires, and
`tests.versions.selection`. A row of the page is written as soon as it has run, and stays until it
runs again. It needs a package index and, for PyTorch, 6 GB of disk. Where the set ``nightly``
passes on all backends, requirements/keras-nightly.txt moves to its version.
"""

import argparse
import datetime
import json
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

from tests.packaging.wheels import BACKENDS, PYTHONS, ROOT, build, interpreters, run, snippet
from tests.versions.nightly import PACKAGE as NIGHTLY
from tests.versions.nightly import move_pin
from tests.versions.selection import TRIPWIRES, suites

FOLDER = ROOT / "build" / "versions"
PAGE = ROOT / "docs" / "versions.md"
LOCK = ROOT / "requirements" / "lock.txt"
SETS = ("newest", "nightly", "locked", "oldest")
# The build for CPUs is the same code, and smaller. PyTorch's is not on PyPI.
PACKAGES = {"tensorflow": "tensorflow-cpu", "jax": "jax", "torch": "torch"}
TOOLS = ("hypothesis", "pytest", "pytest-timeout", "scipy")
GOOD = "passed"

HEAD = """# Versions that were tested

<!-- Written by `make versions`. Do not edit. -->

Each row is an environment of its own, with the versions that `pip` finds for it. In each, kerasdist
is imported, README's first program trains, and `kerasdist test` compares two workers with one
device. Tests check the internals of Keras that kerasdist needs. Some cases of each test suite run:
`fit`, custom loops and jobs of two workers. Everything ran on CPU devices, on Linux. A row names
what does not pass; a combination without a row was not run.

- **oldest**: the lowest versions that `pip install kerasdist` allows and this Python has.
- **locked**: those of `requirements/lock.txt`, with which all tests run on Python 3.11.
- **newest**: the latest that `pip` found on that day.
- **nightly**: the state of Keras's next release that `pip install --pre keras-nightly` found on
  that day, with the newest framework.

Making a strategy raises an error on versions below the lowest, and only there. If an installed
release is in no row, a line at level INFO (logger `kerasdist`) says so. `kerasdist doctor` names
packages that are too old, and internals that kerasdist needs and a version lacks.

| Python | backend | versions | Keras | framework | date | result |
|---|---|---|---|---|---|---|
"""


@dataclass(frozen=True)
class Row:
    python: str
    backend: str
    set: str
    keras: str
    framework: str
    date: str
    result: str

    @property
    def key(self) -> tuple[str, str, str]:
        return (self.python, self.backend, self.set)

    @property
    def is_good(self) -> bool:
        """Whether all passed; what stands behind `GOOD` says where, if not as usual."""
        return self.result.startswith(GOOD)


def rows() -> list[Row]:
    text = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
    found = [
        line.strip("| ").split(" | ") for line in text.splitlines() if re.match(r"\| \d", line)
    ]
    return [Row(*cells) for cells in found]


def page(of: Sequence[Row]) -> str:
    ordered = sorted(of, key=lambda row: (row.backend, row.set, Version(row.python)))
    lines = "".join(f"| {' | '.join(astuple(row))} |\n" for row in ordered)
    return HEAD + lines


def floors() -> dict[str, Version]:
    """The lowest version of Keras and of each backend that pyproject.toml declares."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    texts = [*project["dependencies"], *(text for one in BACKENDS for text in extras[one])]
    found = map(Requirement, texts)
    return {
        one.name: min(Version(each.version) for each in one.specifier if each.operator == ">=")
        for one in found
        if one.name in ("keras", *BACKENDS)
    }


class Environment:
    def __init__(self, python: Path, backend: str):
        self.backend = backend
        self.folder = FOLDER / "env"
        shutil.rmtree(self.folder, ignore_errors=True)
        FOLDER.mkdir(parents=True, exist_ok=True)
        run([python, "-m", "venv", self.folder], FOLDER)
        self.python = self.folder / "bin" / "python"

    def install(self, wheel: Path, which: str):
        package = PACKAGES[self.backend]
        wanted, limits = ["keras", package], []
        if which == "oldest":
            lowest = floors()
            pairs = (("keras", lowest["keras"]), (package, lowest[self.backend]))
            wanted = [f"{name}=={self._first(name, floor)}" for name, floor in pairs]
        if which == "locked":
            limits = ["--constraint", LOCK]
        run(
            [
                *(self.python, "-m", "pip", "install", "--quiet", "--no-compile"),
                *("--disable-pip-version-check", *limits, wheel, *wanted, *TOOLS),
            ],
            FOLDER,
        )

    def take_nightly(self):
        """Puts Keras's nightly in the place of Keras; pip does not know that they are one."""
        pip = (self.python, "-m", "pip")
        quiet = ("--quiet", "--disable-pip-version-check")
        run([*pip, "uninstall", *quiet, "--yes", "keras"], FOLDER)
        # `--pre` would bring other packages' pre-releases as well.
        run([*pip, "install", *quiet, "--no-compile", f"{NIGHTLY}>=3.0.dev0"], FOLDER)

    def _first(self, package: str, floor: Version) -> Version:
        """The lowest version that there is for this Python, from the floor on."""
        said = run([self.python, "-m", "pip", "index", "versions", package], FOLDER)
        [line] = re.findall("Available versions: (.*)", said)
        return min(one for one in map(Version, line.split(", ")) if one >= floor)

    def versions(self) -> tuple[str, str]:
        code = (
            f"import json, keras, kerasdist, {self.backend} as framework;"
            "print(json.dumps([keras.__version__, framework.__version__]))"
        )
        keras, framework = json.loads(self._run(["-c", code]).splitlines()[-1])
        return keras, framework

    def try_all(self) -> str:
        """Runs everything, and returns the failures."""
        script = FOLDER / "train.py"
        script.write_text(snippet(), encoding="utf-8")
        devices = {"KERASDIST_CPU_DEVICES": "2"}
        test = ("-m", "kerasdist", "test", "--backend", self.backend, "--workers", "2")
        # A test named after one backend runs on the others as well, which are not here.
        named = " and not ".join([self.backend, *(one for one in BACKENDS if one != self.backend)])
        tripwires = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", named)
        results = ("--results", str(FOLDER / "results"))
        selection = ("-m", "tests.versions.selection", self.backend)
        steps = {
            "README's program": ([script], devices),
            "`kerasdist test`": (test, {}),
            "tripwires": ((*tripwires, *TRIPWIRES), {}),
            **{suite: ((*selection, suite, *results), {}) for suite in suites(self.backend)},
        }
        failed = []
        for name, (command, more) in steps.items():
            began = time.monotonic()
            try:
                self._run(command, more)
                said = "passed"
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                said = f"FAILED: {error}"
                failed.append(name)
            print(f"    {name}, {time.monotonic() - began:.0f} s: {said}", flush=True)
        return f"fails: {', '.join(failed)}" if failed else GOOD

    def _run(self, command: Sequence[object], more: Mapping[str, str] | None = None) -> str:
        return run([self.python, *command], ROOT, {"KERAS_BACKEND": self.backend, **(more or {})})


def look(environment: Environment, python: str, which: str) -> Row:
    """Tries everything in an environment, and writes its row."""
    keras, framework = environment.versions()
    result, date = environment.try_all(), datetime.date.today().isoformat()
    row = Row(python, environment.backend, which, keras, framework, date, result)
    found = {one.key: one for one in rows()}
    PAGE.write_text(page([*{**found, row.key: row}.values()]), encoding="utf-8")
    print(f"  {row}", flush=True)
    return row


def passed_nightly(ran: Sequence[Row]) -> str | None:
    """The nightly with which all has passed that has run, if that was each backend."""
    of_nightly = [row for row in ran if row.set == "nightly"]
    versions = {row.keras for row in of_nightly}
    is_whole = {row.backend for row in of_nightly} == {*BACKENDS} and len(versions) == 1
    return versions.pop() if is_whole and all(row.is_good for row in of_nightly) else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=list(BACKENDS))
    parser.add_argument("--pythons", nargs="+", default=list(PYTHONS))
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    options = parser.parse_args()
    sets = [one for one in SETS if one in options.sets]
    wheel = build(FOLDER / "wheel")
    ran: list[Row] = []
    for version, python in interpreters(options.pythons):
        for backend in options.backends:
            installed, environment = "", None
            for which in sets:
                print(f"Python {version}, {backend}, {which}", flush=True)
                packages = "newest" if which == "nightly" else which
                if environment is None or installed != packages:
                    environment = Environment(python, backend)
                    environment.install(wheel, packages)
                if which == "nightly":
                    environment.take_nightly()
                installed = which
                ran.append(look(environment, version, which))
            shutil.rmtree(FOLDER / "env", ignore_errors=True)
    if version := passed_nightly(ran):
        move_pin(version)
    return int(not ran or any(not row.is_good for row in ran))


if __name__ == "__main__":
    sys.exit(main())
