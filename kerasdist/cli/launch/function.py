"""``kerasdist.launch`` calls a function in several workers of this machine.

Each worker runs this file, which reads a pickled function from a folder and calls it. Worker 0
writes the function's result to that folder. A worker whose function raises an error writes the
error there.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from kerasdist.cli.launch.job import run_job
from kerasdist.cli.launch.placement import with_workers
from kerasdist.cli.launch.spec import STOP_SECONDS, AttemptResult, JobSpec
from kerasdist.cluster import detection
from kerasdist.cluster.kerasdist_variables import RANK
from kerasdist.core.backend_choice import VARIABLE, is_installed
from kerasdist.errors import JobError, UnsupportedError
from kerasdist.job.job import current_job

CALL, RESULT = "call", "result"


def pickler() -> ModuleType:
    """Returns cloudpickle, which can pickle a notebook's functions, or pickle if it is missing."""
    return importlib.import_module("cloudpickle") if is_installed("cloudpickle") else pickle


def _failure_file(folder: Path, rank: int) -> Path:
    """Returns the path to which a worker writes its error: the traceback and the exception."""
    return folder / f"failure-{rank}"


def _main(folder: Path, rank: int) -> None:
    try:
        fn, args = pickle.loads((folder / CALL).read_bytes())
        value = fn(*args)
        if rank == 0:
            (folder / RESULT).write_bytes(pickler().dumps(value))
    except Exception as error:
        written = pickle.dumps("".join(traceback.format_exception(error)))
        with contextlib.suppress(Exception):  # some errors cannot be pickled
            written += pickler().dumps(error)
        _failure_file(folder, rank).write_bytes(written)
        raise


def launch(
    fn: Callable[..., object],
    args: Sequence[object] = (),
    *,
    workers: int | Literal["gpu"] = "gpu",
    env: Mapping[str, str] | None = None,
    logs: Path | None = None,
    stop_seconds: float = STOP_SECONDS,
) -> Any:
    """Calls a function in several new processes of this machine, the workers of a job.

    This function is meant for notebooks and interactive interpreters; start a script by ``kerasdist
    run``. `fn` may be defined in the notebook. The arguments and the result of `fn` are pickled, so
    make the strategy and the model, and load the data, inside of `fn`.

    Example::

        def train(epochs):
            import keras
            import kerasdist as kd

            strategy = kd.MirroredStrategy()  # over the workers, each with one GPU
            with strategy.scope():
                model = keras.Sequential([keras.layers.Dense(1)])
                model.compile(optimizer="adam", loss="mse")
            return model.fit(x, y, batch_size=256, epochs=epochs).history

        history = kd.launch(train, args=(3,), workers="gpu")

    Args:
        fn: The function, which all workers call.
        args: The arguments of the function.
        workers: The number of workers; ``"gpu"`` means one per GPU of this machine.
        env: Additional environment variables for the workers.
        logs: A folder with one file for each worker's output; None: the output is shown here.
        stop_seconds: How long workers have from SIGTERM to SIGKILL, after Ctrl-C or a failure.

    Returns:
        The function's result in worker 0.

    Raises:
        Exception: The error that a worker raised first, with its traceback as a note.
        KeyboardInterrupt: After Ctrl-C, which ends all workers.
        JobError: If a worker failed in another way, such as by a signal, or this process is itself
            a worker.
        DeviceError: If `workers` is ``"gpu"`` and this machine has no GPU.
        UnsupportedError: If the function or its arguments cannot be pickled.
    """
    if current_job() is not None or detection.detect() is not None:
        raise JobError(
            "Expected a process that is no worker of a job, since each of the workers would start "
            f"others. Received: a worker, which calls launch({fn!r:.200}). Call the function."
        )
    call = _pickled(fn, args)
    with tempfile.TemporaryDirectory(prefix="kerasdist-") as name:
        folder = Path(name)
        (folder / CALL).write_bytes(call)
        spec = JobSpec(
            (sys.executable, "-m", __name__, name),
            workers,
            logs=logs,
            stop_seconds=stop_seconds,
            environment={**_of_this_process(), **(env or {})},
        )
        job = run_job(with_workers(spec, workers) if isinstance(workers, int) else spec)
        return _outcome(job.attempts[-1], folder)


def _outcome(attempt: AttemptResult, folder: Path) -> Any:
    """Returns the result of worker 0, or raises the error of a worker."""
    if attempt.signal == signal.SIGINT:
        raise KeyboardInterrupt
    result, workers = folder / RESULT, len(attempt.endings)
    if attempt.exit_code == 0 and result.exists():
        return pickle.loads(result.read_bytes())
    failed = attempt.cause or attempt.endings[0]
    who = f"[worker {failed.rank}/{workers}]"
    file = _failure_file(folder, failed.rank)
    if not file.exists():
        raise JobError(
            f"{who} Expected the function to return. Received: {failed.reason}. Its last lines: "
            f"{list(failed.last_lines[-3:])}."
        )
    with file.open("rb") as written:
        trace = pickle.load(written)
        try:
            error: Exception = pickle.load(written)
        except Exception:  # noqa: BLE001  some errors cannot be unpickled
            raise JobError(f"{who} The function has raised an error.\n{trace}") from None
    error.add_note(f"{who} {trace}")
    raise error


def _of_this_process() -> dict[str, str]:
    """Returns the variables that give a worker this process's import path and backend."""
    paths = [os.environ.get("PYTHONPATH", ""), *sys.path]
    variables = {"PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    keras = sys.modules.get("keras")
    if keras is not None:
        variables[VARIABLE] = keras.backend.backend()
    return variables


def _pickled(fn: Callable[..., object], args: Sequence[object]) -> bytes:
    chosen = pickler()
    if chosen is pickle and fn.__module__ == "__main__":
        raise UnsupportedError(
            "Expected the package cloudpickle, which takes functions of a notebook or script to "
            f"other processes. Received: fn={fn!r:.200}, without it. Install it: pip install "
            "'kerasdist[launch]'; or write the function into a module of its own and import it."
        )
    try:
        return chosen.dumps((fn, tuple(args)))
    except Exception as error:  # an object that pickles itself may raise any error
        raise UnsupportedError(
            f"Expected a function and arguments that can be pickled. Received: fn={fn!r:.200}, "
            f"args={args!r:.200}, and {type(error).__name__}: {error}. Make models, strategies and "
            "open files in the function."
        ) from error


if __name__ == "__main__":
    _main(Path(sys.argv[1]), int(os.environ[RANK]))
