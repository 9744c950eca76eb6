"""Runs cases on one backend, all of them in this process, and tells of each in a JSON line.

    python -m tests.conformance.worker --backend jax [--suite tests.facade] < names-of-items

It reads the next name when the last case has run. Standard output carries the JSON lines alone;
whatever the cases print goes to standard error. A case that exceeds its time limit ends the process
with the stacks of all threads on standard error; the caller runs the other cases in a new process.
"""

import argparse
import faulthandler
import gc
import importlib
import json
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from tests.conformance import registry
from tests.environment import fail_on_deprecations, of_suite

COLLECT_EVERY = 5
COLLECT_SECONDS = 900
# Without these packages nothing can be tested; without another, its cases are left out.
OWN = ("kerasdist", "keras", "jax", "torch", "tests")


def prepare(backend: str, *, as_users: bool = False):
    """Sets everything that must be set before the backend starts."""
    os.environ["KERAS_BACKEND"] = backend
    fail_on_deprecations()
    if as_users:
        return
    of_suite(backend)
    # Tracing makes many objects that stay for long: to look through every 700 costs a twentieth.
    gc.set_threshold(50_000)


def run_item(item: registry.Item, labs: Callable[[registry.Item], Any]) -> dict:
    lab = labs(item)
    start, cpu = time.perf_counter(), time.process_time()
    line = {"status": "passed", "message": "", "traceback": ""}
    try:
        item.case.function(lab)
        if item.backend in item.case.refused:
            line.update(
                status="failed",
                message="declared as refused on this backend, but it worked: "
                f"expected {item.case.refused[item.backend]}",
            )
    except Exception as error:  # noqa: BLE001 (whatever a case raises is its result)
        line.update(verdict(item, error))
    return {
        **line,
        "seconds": round(time.perf_counter() - start, 3),
        "cpu_seconds": round(time.process_time() - cpu, 3),
        "difference": lab.difference,
        "tolerances": sorted(lab.tolerances),
    }


def verdict(item: registry.Item, error: Exception) -> dict:
    # Notes carry hypothesis's falsifying example.
    notes = getattr(error, "__notes__", ())
    message = "\n".join([*notes, f"{type(error).__name__}: {error}"])
    expected = item.case.refused.get(item.backend)
    if expected is not None:
        kind, pattern = expected
        kinds = {base.__name__ for base in type(error).__mro__}
        if kind in kinds and re.search(pattern, str(error), re.IGNORECASE | re.DOTALL):
            return {"status": "refused", "message": message}
        message = f"expected {kind} matching {pattern!r}, received {message}"
    if registry.SUITES_ON in os.environ and (package := missing_package(error)):
        return {"status": "left out", "message": f"it needs {package}, which is not here"}
    status = "failed" if isinstance(error, AssertionError) else "error"
    return {"status": status, "message": message, "traceback": traceback.format_exc()}


def missing_package(error: Exception) -> str:
    """Returns the package that a case needs and that this machine lacks, as a GPU machine may."""
    if isinstance(error, ModuleNotFoundError) and error.name:
        package = error.name.partition(".")[0]
        return "" if package in OWN else package
    is_keras = isinstance(error, ImportError) and "requires TensorFlow" in str(error)
    return "tensorflow" if is_keras else ""


def reset():
    """Resets Keras's global state, so that one case cannot change the next."""
    import keras

    keras.config.set_dtype_policy("float32")
    keras.config.enable_traceback_filtering()
    keras.backend.clear_session(free_memory=False)


def collect():
    """Collects garbage, then freezes the rest: later collections look at new objects only."""
    gc.collect()
    gc.freeze()


def own_lines() -> Callable[..., None]:
    """Returns a function that writes JSON lines to standard output, which gets nothing else."""
    lines = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return lambda **line: print(json.dumps(line), file=lines)


def run_items(
    tell, backend: str, items: Iterable[tuple[str, registry.Item]], labs
) -> Iterator[str]:
    """Tells of each case, by its key, as it begins and has ended; then yields how."""
    import keras

    keras.utils.disable_interactive_logging()
    keras.config.disable_traceback_filtering()
    collect()
    tell(event="ready", backend=backend)
    for key, item in items:
        faulthandler.dump_traceback_later(item.case.seconds, exit=True)
        tell(event="start", key=key)
        print(f"\n===== {key} =====", file=sys.stderr, flush=True)
        line = run_item(item, labs)
        reset()
        tell(event="end", key=key, **line)
        if line["traceback"]:
            print(line["traceback"], file=sys.stderr, flush=True)
        yield line["status"]
    faulthandler.cancel_dump_traceback_later()
    tell(event="done")
    sys.stderr.flush()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", required=True, choices=registry.BACKENDS)
    parser.add_argument("--suite", default=registry.CONFORMANCE)
    parser.add_argument("--devices", type=int, default=max(registry.REPLICAS))
    parser.add_argument("--plain", action="store_true", help="plain against plain: the harness")
    parser.add_argument("--as-users", action="store_true", help="with no setting of the tests")
    arguments = parser.parse_args()

    tell = own_lines()
    known = {item.key: item for item in registry.items(arguments.backend, arguments.suite)}
    prepare(arguments.backend, as_users=arguments.as_users)
    faulthandler.dump_traceback_later(900, exit=True)
    import keras

    if not arguments.plain:
        import kerasdist as kd

        kd.config.set_logical_cpu_devices(arguments.devices)
    labs = importlib.import_module(f"{arguments.suite}.lab").labs(mirrored=not arguments.plain)
    if keras.backend.backend() != arguments.backend:
        raise SystemExit(
            f"Keras should run on {arguments.backend}. Received: {keras.backend.backend()}."
        )
    items = ((key, known[key]) for key in map(str.strip, iter(sys.stdin.readline, "")))
    for number, _ in enumerate(run_items(tell, arguments.backend, items, labs), start=1):
        if number % COLLECT_EVERY == 0:
            # Not in a case's time: where plain Keras has left iterators of tf.data behind, each may
            # take as long as it is old (`untuned` in kerasdist/backends/tensorflow).
            faulthandler.dump_traceback_later(COLLECT_SECONDS, exit=True)
            collect()
    # A case may leave a thread behind; it shall not keep us from ending.
    os._exit(0)


if __name__ == "__main__":
    main()
