"""Starts a backend's workers, reads their lines, and starts a new one for what a dead one left."""

import contextlib
import itertools
import json
import os
import queue
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.conformance import registry
from tests.environment import of_users

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(os.environ.get("KERASDIST_CONFORMANCE_RESULTS", ROOT / "build" / "conformance"))
STARTUP_SECONDS = 600.0
GRACE_SECONDS = 15.0
LOG_TAIL = 6000
# TensorFlow traces each model for every replica: its cases take as long as all others together.
# Two processes share the cases if there are more than this number.
MANY_CASES = 100
PROCESSES = {"tensorflow": 2}


@dataclass(frozen=True)
class Result:
    key: str
    backend: str
    # passed; refused: the declared error came; left out: a package is not here (`make gpu` alone);
    # failed: a comparison; error: it raised; timeout: over its limit; died: the process did
    status: str
    seconds: float = 0.0
    # Of all threads: what the case costs, whatever else the machine does meanwhile.
    cpu_seconds: float = 0.0
    difference: float = 0.0
    tolerances: Sequence[str] = field(default_factory=tuple)
    message: str = ""
    traceback: str = ""

    @property
    def good(self) -> bool:
        return self.status in ("passed", "refused", "left out")


class Worker:
    """A process. Iterating yields results; the last result may say that the process has died."""

    def __init__(
        self,
        backend: str,
        keys: Iterator[str],
        log: Path,
        command: Sequence[str],
        limits: Mapping[str, float],
        environment: Mapping[str, str] | None = None,
        *,
        at_once: bool = False,
    ):
        """Starts the process, which is given a key as soon as it has run the last one.

        ``command``: a module and its arguments; ``limits``: seconds a case may take; ``at_once``:
        gives it all keys as it starts.
        """
        self.backend = backend
        self._limits = limits
        self._log_path = log
        self._log = log.open("ab")
        self._log_start = log.stat().st_size
        self._process = subprocess.Popen(
            [sys.executable, "-m", *command, "--backend", backend],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        self._keys, self._at_once = keys, at_once
        self._give()
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _give(self):
        """Passes a key on to the process, or all keys; closes its input after the last key."""
        keys = list(itertools.islice(self._keys, None if self._at_once else 1))
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # the process has died; `results` reports that
            self._process.stdin.writelines(f"{key}\n" for key in keys)
            self._process.stdin.flush()
            if self._at_once or not keys:
                self._process.stdin.close()

    def _read(self):
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self._lines.put(line)
        self._lines.put(None)

    def results(self) -> Iterator[Result]:
        running, limit = "", STARTUP_SECONDS
        while True:
            try:
                text = self._lines.get(timeout=limit)
            except queue.Empty:
                yield self._dead(running, "timeout", f"silent for {limit:.0f} s; killed")
                return
            if text is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(GRACE_SECONDS)  # its own exit code, not our kill's
                yield self._dead(running, "died", "")
                return
            line = json.loads(text)
            event = line.pop("event")
            if event == "start":
                running = line["key"]
                limit = self._limits[running] + GRACE_SECONDS
            elif event == "end":
                running, limit = "", STARTUP_SECONDS
                if not self._at_once:
                    self._give()
                yield Result(backend=self.backend, **line)
            elif event == "done":
                return

    def _dead(self, key: str, status: str, message: str) -> Result:
        self.stop()
        with self._log_path.open("rb") as file:
            file.seek(self._log_start)
            log = file.read().decode("utf-8", "replace")
        # What the case itself said, and the stacks that end it, before all that went well.
        tail = log[max(0, log.find(f"===== {key} =====")) :][-LOG_TAIL:]
        if "Timeout (" in tail:
            status, message = "timeout", f"over its limit of {self._limits.get(key, 0):.0f} s"
        code = self._process.returncode
        message = message or f"the worker process ended with exit code {code}"
        return Result(key=key, backend=self.backend, status=status, message=message, traceback=tail)

    def stop(self):
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait(GRACE_SECONDS)
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._reader.join(GRACE_SECONDS)
        self._log.close()


class BackendRun:
    """The selected items of one backend, run once, results kept as they come."""

    def __init__(
        self,
        backend: str,
        keys: Sequence[str],
        plain: bool = False,
        suite: str = registry.CONFORMANCE,
    ):
        """Starts at once, in a thread: the backends run beside each other."""
        limits = {item.key: item.case.seconds for item in registry.items(backend, suite)}
        command = ["tests.conformance.worker", "--suite", suite, *(["--plain"] if plain else [])]
        name = suite.rpartition(".")[2]
        is_largest = suite == registry.CONFORMANCE
        folder = RESULTS if is_largest else RESULTS.with_name(name)
        processes = PROCESSES.get(backend, 1) if is_largest else 1
        self._start(backend, keys, command, limits, folder, backend, processes)

    @classmethod
    def of_group(
        cls, backend: str, keys: Sequence[str], layout: str, limits: Mapping[str, float]
    ) -> "BackendRun":
        """The same for a group of processes (`tests.multiprocess`) that run each case together."""
        run = object.__new__(cls)
        command = ["tests.multiprocess.group", "--layout", layout]
        folder = RESULTS.with_name("multiprocess")
        run._start(backend, keys, command, limits, folder, f"{backend}-{layout}", at_once=True)
        return run

    def _start(
        self, backend, keys, command, limits, folder: Path, name, processes=1, *, at_once=False
    ):
        self.backend = backend
        self._processes = processes
        self._at_once = at_once
        self._command = command
        self._limits = limits
        self._keys = list(dict.fromkeys(keys))
        self._results: queue.Queue[Result | None] = queue.Queue()
        self._known: dict[str, Result] = {}
        self._workers: list[Worker] = []
        self._stopped = False
        self._name = name
        self.folder = folder
        self.folder.mkdir(parents=True, exist_ok=True)
        self.log = self.folder / f"{name}.log"
        threading.Thread(target=self._run, name=f"{folder.name}-{name}", daemon=True).start()

    def _run(self):
        as_users = [key for key in self._keys if key.startswith(registry.AS_USERS_HAVE_IT)]
        todo = self._by_case([key for key in self._keys if key not in as_users])
        many = self._processes if len(todo) > MANY_CASES else 1
        runs: list[tuple[Any, ...]] = [(todo, (), None)] * many
        if as_users:
            runs.append((deque([as_users]), ("--as-users",), of_users()))
        try:
            threads = [
                threading.Thread(target=self._run_in, args=(log, *run), name=log.stem, daemon=True)
                for log, run in zip(self._logs(len(runs)), runs, strict=True)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            self._results.put(None)

    @staticmethod
    def _by_case(keys: list[str]) -> deque[list[str]]:
        """A case with all its numbers of replicas, which share much, is for one process."""
        by_case: dict[str, list[str]] = {}
        for key in keys:
            by_case.setdefault(key.rpartition("-x")[0] or key, []).append(key)
        return deque(by_case.values())

    def _logs(self, many: int) -> list[Path]:
        logs = [self.log, *(self.log.with_stem(f"{self._name}-{i}") for i in range(2, many + 1))]
        for log in logs:
            log.write_bytes(b"")
        return logs

    def _run_in(self, log: Path, todo: deque[list[str]], options, environment):
        """Runs cases that no other process has taken, in one process after another's death."""
        taken: deque[str] = deque()
        given: list[str] = []

        def take() -> Iterator[str]:
            while taken or todo:
                if not taken:
                    with contextlib.suppress(IndexError):  # another process took the last one
                        taken.extend(todo.popleft())
                    continue
                given.append(taken.popleft())
                yield given[-1]

        command = [*self._command, *options]
        while (taken or todo) and not self._stopped:
            worker = Worker(
                self.backend, take(), log, command, self._limits, environment, at_once=self._at_once
            )
            self._workers.append(worker)
            for result in worker.results():
                if result.key:
                    given.remove(result.key)
                    self._results.put(result)
                    continue
                # It died before a case began, as every other process would.
                for key in itertools.chain(given, taken, *todo):
                    self._results.put(replace(result, key=key))
                for done in (given, taken, todo):
                    done.clear()
            worker.stop()
            taken.extendleft(reversed(given))
            given.clear()

    def results(self) -> Iterator[Result]:
        """Results in the order of the items, each as soon as it is known."""
        while (result := self._results.get()) is not None:
            self._known[result.key] = result
            yield result
        # For whoever asks again: the end is the end.
        self._results.put(None)

    def result(self, key: str) -> Result:
        for _ in self.results() if key not in self._known else ():
            if key in self._known:
                break
        return self._known.get(key) or Result(
            key, self.backend, "error", message=f"the worker never ran it; see {self.log}"
        )

    def stop(self):
        self._stopped = True
        for worker in self._workers:
            worker.stop()

    def save(self) -> Path:
        """JSON lines of what ran, for ``python -m tests.conformance.support``."""
        path = self.folder / f"{self._name}.jsonl"
        with path.open("w", encoding="utf-8") as file:
            for result in self._known.values():
                file.write(json.dumps(asdict(result)) + "\n")
        return path


class Runs:
    """The items that a pytest session selected; those of a suite begin when the first is due."""

    def __init__(self, items: Iterable[Any]):
        self._keys: dict[str, dict[str, list[str]]] = {}
        for item in items:
            params = item.callspec.params if hasattr(item, "callspec") else {}
            if "suite" in params and "key" in params:
                keys = self._keys.setdefault(params["suite"], {})
                keys.setdefault(params["backend"], []).append(params["key"])
        self._runs: dict[str, dict[str, BackendRun]] = {}

    def result(self, suite: str, backend: str, key: str) -> Result:
        if suite not in self._runs:
            self._runs[suite] = {
                one: BackendRun(one, keys, suite=suite) for one, keys in self._keys[suite].items()
            }
        return self._runs[suite][backend].result(key)

    def close(self):
        for runs in self._runs.values():
            for run in runs.values():
                run.stop()
                run.save()


def main(suite: str = registry.CONFORMANCE):
    """``python -m tests.conformance.runner jax [pattern ...]``: for work on a few cases."""
    import argparse

    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("backend", choices=registry.BACKENDS)
    parser.add_argument("patterns", nargs="*", help="parts of names; all cases without one")
    parser.add_argument("--plain", action="store_true", help="plain against plain: the harness")
    parser.add_argument("-v", "--verbose", action="store_true", help="print tracebacks")
    arguments = parser.parse_intermixed_args()
    keys = [
        item.key
        for item in registry.items(arguments.backend, suite)
        if not arguments.patterns or any(part in item.key for part in arguments.patterns)
    ]
    run = BackendRun(arguments.backend, keys, arguments.plain, suite)
    sys.exit(0 if report(run, arguments.verbose) else 1)


def report(run: BackendRun, verbose: bool) -> bool:
    """Prints a line a case, as they end; returns whether all are good."""
    counts: dict[str, int] = {}
    good = True
    for result in run.results():
        good &= result.good
        counts[result.status] = counts.get(result.status, 0) + 1
        head = f"{result.status:8} {result.seconds:6.2f} s  {result.difference:8.1e}  {result.key}"
        print(head + ("" if result.status == "passed" else f"\n    {result.message[:1500]}"))
        if verbose and result.traceback:
            print(result.traceback)
        sys.stdout.flush()
    run.save()
    print(counts, "log:", run.log)
    return good


if __name__ == "__main__":
    main()
