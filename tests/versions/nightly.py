"""Keras's nightly of the day: does kerasdist work with it, and if not, whose fault is it?

    python -m tests.versions.nightly [VERSION]

is `make nightly`, for a maintainer: the exit status is 1 if anything fails with the newest
``keras-nightly`` of the package index, or with VERSION; else requirements/keras-nightly.txt, the
last that passed, moves to it. What CI makes of a failure is in `test_nightly_keras.py`, and why in
docs/adr/0104-keras-nightly-in-ci.md.
"""

import argparse
import datetime
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tests.fresh import ROOT, run_fresh, run_python
from tests.packaging.wheels import snippet
from tests.versions.selection import (
    BACKENDS,
    QUICK,
    TRIPWIRES,
    bad,
    first_on_the_path,
    start,
    suites,
)

PACKAGE = "keras-nightly"
PIN = ROOT / "requirements" / "keras-nightly.txt"
REPORT = ROOT / "build" / "nightly.md"
# Each version has a folder of its own there: its files, and those of no other package.
FOLDER = Path(sys.prefix) / "keras-nightly"
# For so long CI goes on with a Keras that does not fit: see the decision record.
TOLERATED = datetime.timedelta(days=30)
SECONDS = 300

PROGRAM = """
import sys
from tests.environment import fail_on_deprecations

fail_on_deprecations()
import kerasdist
assert "keras" not in sys.modules, "kerasdist imports Keras by itself"
import keras
assert keras.__version__ == {version!r}, keras.__version__
exec({snippet!r})
"""
STRICT = "`make nightly` does not ask whose fault it is"
LOOK = "from kerasdist.cli.diagnostics import machine; machine.tell_internals()"


class NotInstalledError(Exception):
    """The package index has no such nightly, or there is no index."""


@dataclass(frozen=True)
class Nightly:
    version: str
    folder: Path
    # How it was come by.
    note: str = ""

    @property
    def date(self) -> datetime.date:
        [day] = re.findall(r"\.dev(\d{8})", self.version)
        return datetime.datetime.strptime(day, "%Y%m%d").date()


def pinned() -> str:
    """The version of the last nightly that passed."""
    [version] = re.findall(rf"^{PACKAGE}==(\S+)$", PIN.read_text("utf-8"), re.M)
    return version


def move_pin(version: str):
    text = PIN.read_text("utf-8")
    PIN.write_text(text.replace(f"=={pinned()}", f"=={version}"), encoding="utf-8")


def install(version: str | None = None) -> Nightly:
    """Puts a nightly into a folder, the newest without a version; nothing else is installed."""
    if version is not None and (FOLDER / version).is_dir():
        return Nightly(version, FOLDER / version)
    FOLDER.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FOLDER) as name:
        wanted = PACKAGE if version is None else f"{PACKAGE}=={version}"
        options = ("--quiet", "--disable-pip-version-check", "--no-compile", "--pre", "--no-deps")
        pip = (sys.executable, "-m", "pip", "install", *options, "--retries", "1")
        done = subprocess.run(
            [*pip, "--target", name, wanted], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise NotInstalledError((done.stderr.strip() or "pip failed").splitlines()[-1])
        [information] = Path(name).glob("keras_nightly-*.dist-info")
        found = information.name.removeprefix("keras_nightly-").removesuffix(".dist-info")
        if not (FOLDER / found).is_dir():
            # The temporary folder is for this user alone, and its name is no version.
            shutil.copytree(name, FOLDER / found)
    return Nightly(found, FOLDER / found)


def of_today(installed: Callable[..., Nightly] = install) -> Nightly:
    """The newest of the package index, or where it has none the last that passed."""
    try:
        newest = installed()
        note = f"the newest of the package index, of {newest.date}"
    except NotInstalledError as error:
        newest = installed(pinned())
        note = f"the last that passed, as the package index has none today ({error})"
    return Nightly(newest.version, newest.folder, note)


def parts(backend: str) -> tuple[str, ...]:
    return (*PROGRAMS, *suites(backend, QUICK))


def failures(nightly: Nightly, backend: str, only: Iterable[str] = ()) -> dict[str, str]:
    """Runs all parts of the selection, or some; what failed, by its name, and its last lines."""
    chosen = [*only] or parts(backend)
    found: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as results, first_on_the_path(nightly.folder, Path(results)):
        started = {one: start(backend, one, QUICK[one]) for one in chosen if one in QUICK}
        for one in chosen:
            if one in PROGRAMS:
                try:
                    PROGRAMS[one](nightly, backend)
                except (AssertionError, subprocess.TimeoutExpired) as error:
                    found[one] = last_lines(str(error))
        for suite, run in started.items():
            for one in bad(run, len(QUICK[suite])):
                said = one.traceback or one.message
                found[f"{suite} {one.key}"] = f"{one.status}: {last_lines(said)}"
            run.stop()
    return found


def train(nightly: Nightly, backend: str):
    code = PROGRAM.format(version=nightly.version, snippet=snippet())
    run_fresh(code, seconds=SECONDS, KERAS_BACKEND=backend, KERASDIST_CPU_DEVICES="2")


def look_at_tripwires(nightly: Nightly, backend: str):
    options = ("-q", "-p", "no:cacheprovider", "-k", backend)
    run_python("-m", "pytest", *options, *TRIPWIRES, seconds=SECONDS)


PROGRAMS: dict[str, Callable[[Nightly, str], None]] = {
    "import and README's program": train,
    "tripwires": look_at_tripwires,
}


def last_lines(text: str, number: int = 3) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    of_pytest = [line for line in lines if line.startswith("E ")]
    return " / ".join((of_pytest or lines)[-number:])


def gone(nightly: Nightly, backend: str) -> list[str]:
    """Returns the declared internals of Keras or the framework that are missing."""
    with first_on_the_path(nightly.folder, nightly.folder):
        try:
            told = json.loads(run_fresh(LOOK, KERAS_BACKEND=backend).splitlines()[-1])
        except AssertionError as error:
            return [f"not known: {last_lines(str(error))}"]
    return [f"{one['found']}. {one['meaning']}" for one in told if one["verdict"] != "ok"]


@dataclass(frozen=True)
class Finding:
    """What was found on a backend, and whose fault it is."""

    backend: str
    nightly: Nightly
    failed: Mapping[str, str] = field(default_factory=dict)
    # Why it is kerasdist's fault; empty: it is not, or nothing has failed.
    ours: str = ""
    gone: Sequence[str] = ()

    @property
    def line(self) -> str:
        what = f"{self.backend}, {PACKAGE} {self.nightly.version} ({self.nightly.note})"
        if not self.failed:
            return f"{what}: passed"
        if self.ours:
            return f"{what}: FAILED. {self.ours}"
        return (
            f"{what}: FAILED, and {pinned()} passes: Keras has changed, kerasdist has not. To be "
            f"mended by `make nightly`; see {REPORT.relative_to(ROOT)}"
        )

    @property
    def text(self) -> str:
        cases = [f"- `{name}`: {said}" for name, said in self.failed.items()]
        lost = [f"- {one}" for one in self.gone]
        heading = f"## {self.backend}"
        return "\n".join(
            [heading, "", self.line, *([""] if cases else []), *cases]
            + (["", "Internals that are gone:", "", *lost] if lost else [])
        )


def judged(
    backend: str,
    nightly: Nightly,
    run: Callable[..., dict[str, str]] = failures,
    installed: Callable[..., Nightly] = install,
    look: Callable[..., list[str]] = gone,
) -> Finding:
    """Tries a nightly, and what fails with the last one that passed: who has broken it?"""
    failed = run(nightly, backend)
    if not failed:
        return Finding(backend, nightly)
    ours = whose(backend, nightly, failed, run, installed)
    return Finding(backend, nightly, failed, ours, look(nightly, backend))


def whose(backend: str, nightly: Nightly, failed, run, installed) -> str:
    """Why kerasdist is at fault, empty if Keras is."""
    if nightly.version == pinned():
        return "It passed with this nightly before: kerasdist has changed"
    try:
        last = installed(pinned())
    except NotInstalledError as error:
        return f"The last that passed, {pinned()}, is not to be had ({error}), to compare with"
    # Cases of a suite share a process: the whole suite again costs little more than one of them.
    parts_again = [*dict.fromkeys(part_of(name, backend) for name in failed)]
    if also := run(last, backend, parts_again):
        return f"So it does with {last.version}, which passed before: {', '.join(also)}"
    if not run(nightly, backend, parts_again):
        return "It passes when it runs again: it fails by chance"
    if nightly.date - last.date > TOLERATED:
        return (
            f"{last.version} passes, and is more than {TOLERATED.days} days older: kerasdist has "
            "to follow Keras (`make nightly`)"
        )
    return ""


def part_of(name: str, backend: str) -> str:
    return next(part for part in parts(backend) if name.startswith(part))


def write(findings: Iterable[Finding]):
    REPORT.parent.mkdir(parents=True, exist_ok=True)
    text = "\n\n".join(["# Keras's nightly", *(one.text for one in findings)])
    REPORT.write_text(text + "\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("version", nargs="?", help="the newest of the package index without one")
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=list(BACKENDS))
    options = parser.parse_args()
    try:
        nightly = replace(install(options.version), note="not compared with any other")
    except NotInstalledError as error:
        print(f"There is no {PACKAGE} {options.version or ''} on the package index: {error}")
        return 1
    found = []
    for backend in options.backends:
        failed = failures(nightly, backend)
        lost = gone(nightly, backend)
        found.append(Finding(backend, nightly, failed, STRICT if failed else "", lost))
        print(found[-1].text, flush=True)
        write(found)
    is_good = not any(one.failed for one in found)
    if is_good and {*options.backends} == {*BACKENDS}:
        move_pin(nightly.version)
    return int(not is_good)


if __name__ == "__main__":
    sys.exit(main())
