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
from tests.versions.features import FEATURES, Here, dense, fit, rows
from tests.versions.renaming import ask_for_another, rename_in_keras

SECONDS = 120.0
_open = contextlib.ExitStack()
atexit.register(_open.close)


@functools.cache
def _waiting(backend: str) -> Nursery:
    settings = values((*QUIET, *CPU_DEVICES))
    nursery = Nursery("-m", "tests.versions.gone", KERAS_BACKEND=backend, **settings)
    return _open.enter_context(nursery)


def without(package: str, paths: Sequence[str], backend: str, feature: str = "") -> dict[str, Any]:
    """What a process finds in which some paths of a package are gone.

    That is: the replicas of its strategy; ``fit`` under it, and plain Keras's, where something is
    gone that each `fit` needs; and what came of the feature. For an error that says that something
    is gone, its text.
    """
    order = json.dumps([package, [*paths], feature])
    [ended] = _waiting(backend).begin([order], [{}]).join(SECONDS)
    assert ended.code == 0, report([ended])
    return json.loads(ended.output.splitlines()[-1])


# --------------------------------------------------------------------------- in the process


def main():
    with _no_keras():
        importlib.import_module(os.environ["KERAS_BACKEND"])
    others = _imported_by_keras()
    with _no_keras():
        for name in others:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
    assert "keras" not in sys.modules
    wait_to_be_one()
    package, paths, feature = json.loads(sys.argv[1])
    (rename_in_keras if package == "keras" else ask_for_another)(paths)
    print(json.dumps(_look(feature)), flush=True)
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


def _look(feature: str) -> dict[str, Any]:
    import kerasdist as kd

    assert "keras" not in sys.modules  # whose absence does not count as that of an internal
    strategy = kd.MirroredStrategy(["cpu:0", "cpu:1"])
    import keras

    x, y = rows()
    here = Here(keras, kd, strategy, x, y)
    found = {"replicas": strategy.num_replicas_in_sync}
    found["fit"] = _tried(lambda: here.fit(here.model()), kd.errors.VersionError)
    if not feature or isinstance(found["fit"], str):
        found["plain"] = fit(dense(keras), x, y)  # Keras itself lacks nothing
    if feature:
        found["feature"] = _tried(lambda: FEATURES[feature].function(here), kd.errors.VersionError)
    return found


def _tried(use: Callable[[], object], gone: type[Exception]) -> Any:
    try:
        return use()
    except gone as error:
        return str(error)


if __name__ == "__main__":
    main()
