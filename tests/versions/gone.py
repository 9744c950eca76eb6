"""Processes in which an internal of Keras or of a framework is gone, and what still works there.

`python -m tests.versions.gone` imports the framework of `KERAS_BACKEND`, and all that Keras
imports, but not Keras: that is imported in each fork, where something has another name.
"""

import atexit
import contextlib
import functools
import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tests.environment import CPU_DEVICES, QUIET, values
from tests.multiprocess.forks import Nursery, report, wait_to_be_one
from tests.multiprocess.launching import job_of
from tests.versions.features import FEATURES
from tests.versions.renaming import ask_for_another, rename_in_keras
from tests.versions.uses import Here, dense, fit

SECONDS = 120.0
_open = contextlib.ExitStack()
atexit.register(_open.close)


@functools.cache
def _waiting(backend: str) -> Nursery:
    settings = values((*QUIET, *CPU_DEVICES))
    nursery = Nursery("-m", "tests.versions.gone", KERAS_BACKEND=backend, **settings)
    return _open.enter_context(nursery)


class Gone:
    """Processes in which some paths of a package are gone, and that use a feature."""

    def __init__(self, package: str, paths: Sequence[str], backend: str, feature: str = ""):
        by_workers = bool(feature) and backend in FEATURES[feature].workers_on
        here = [package, [*paths], "" if by_workers else feature, False]
        self._jobs = [_waiting(backend).begin([json.dumps(here)], [{}])]
        if by_workers:
            work = [package, [*paths], feature, True]
            self._jobs.append(_waiting(backend).begin([json.dumps(work)], job_of(2)))

    @functools.cached_property
    def found(self) -> dict[str, Any]:
        """What was found.

        That is: the replicas of a strategy; ``fit`` under it, and plain Keras's, where something is
        gone that each `fit` needs; and what came of the feature, on each worker. For an error that
        says that something is gone, its text.
        """
        ended = [one for job in self._jobs for one in job.join(SECONDS)]
        assert all(one.code == 0 for one in ended), report(ended)
        first, *workers = [json.loads(one.output.splitlines()[-1]) for one in ended]
        return {**first, "feature": [*first["feature"], *(one["feature"][0] for one in workers)]}


# --------------------------------------------------------------------------- in the process


def main():
    with _no_keras():
        for name in (os.environ["KERAS_BACKEND"], "tensorflow"):  # whose pipelines all can read
            importlib.import_module(name)
    others = _imported_by_keras()
    with _no_keras():
        for name in others:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
    assert "keras" not in sys.modules
    wait_to_be_one()
    package, paths, feature, is_worker = json.loads(sys.argv[1])
    (rename_in_keras if package == "keras" else ask_for_another)(paths)
    print(json.dumps(_look(feature, is_worker)), flush=True)
    if not is_worker:
        os._exit(0)  # frameworks need not end what nobody uses


@contextlib.contextmanager
def _no_keras() -> Iterator[None]:
    """Nobody can import Keras; TensorFlow would, where it finds it."""
    sys.modules["keras"] = None  # type: ignore[assignment]
    yield
    del sys.modules["keras"]


def _imported_by_keras() -> list[str]:
    """The modules that are there when Keras is; found out in a fork."""
    read, write = os.pipe()
    if os.fork() == 0:
        importlib.import_module("keras")
        with os.fdopen(write, "w") as file:
            json.dump([name for name in sys.modules if not name.startswith("keras.")], file)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as file:
        names = json.load(file)
    os.wait()
    return [name for name in names if name != "keras"]


def _look(feature: str, is_worker: bool) -> dict[str, Any]:
    here = Here(is_worker=is_worker)
    gone = here.kd.errors.VersionError
    assert "keras" not in sys.modules  # it is imported when a strategy is made
    found: dict[str, Any] = {"feature": []}
    if not is_worker:
        found["replicas"] = here.strategy.num_replicas_in_sync
    if not is_worker:
        found["fit"] = _tried(lambda: here.fit(here.model()), gone)
        if not feature or isinstance(found["fit"], str):
            found["plain"] = fit(dense(here.keras), here.x, here.y)  # Keras itself lacks nothing
    if feature:
        found["feature"] = [_tried(lambda: FEATURES[feature].function(here), gone)]
    return found


def _tried(use: Callable[[], object], gone: type[Exception]) -> Any:
    try:
        return use()
    except gone as error:
        return str(error)


if __name__ == "__main__":
    main()
