"""How long does an elastic job stand still when a worker is killed, and what takes the time?

    python benchmarks/restart_times.py --backend torch [--events 5] [--workers 3] [--json FILE]

A small network trains on several workers of this machine. A random worker is killed by SIGKILL,
some seconds after the job has made its first step, and again after it has gone on. The table has
the seconds from the kill to the first step after it, in parts; each ends as the last worker has
done what it names.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import os
import random
import secrets
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import median

BACKENDS = ("tensorflow", "jax", "torch")
PARTS = {
    "noticed": "the launcher knows of it",
    "ended": "the other workers have ended",
    "began": "new processes run the script",
    "imported": "they have imported Keras and the framework",
    "joined": "they have made the strategy",
    "step": "the backup is restored, and a step is made",
}
ENOUGH = "enough"
STEP_SECONDS = 0.02
WARM_SECONDS = 100.0
HANG_SECONDS = 120.0


def stamps(folder: Path, attempt: int) -> list[dict[str, float]]:
    """Returns the time stamps of the workers of a start of the job, as far as they are."""
    files = sorted(folder.glob(f"stamps-{attempt}-*"))
    return [dict(map(json.loads, path.read_text().splitlines())) for path in files]


def train(folder: Path) -> None:
    """Trains as a worker of the job, until there is enough."""
    own = f"{os.environ['KERASDIST_RESTART']}-{os.environ['KERASDIST_RANK']}"
    lines = (folder / f"stamps-{own}").open("w", buffering=1)

    def stamp(what: str, value: float | None = None) -> None:
        lines.write(json.dumps([what, value or time.time()]) + "\n")

    stamp("began")
    stamp("pid", os.getpid())
    import keras
    import numpy as np

    import kerasdist as kd

    kd.callbacks.BackupAndRestore  # noqa: B018 - which imports the backend
    stamp("imported")
    strategy = kd.MultiWorkerMirroredStrategy()
    stamp("joined")

    # Not in the callback, whose attributes a backup restores.
    begun_at: list[int] = []

    class Stamps(keras.callbacks.Callback):
        def updates(self) -> int:
            return int(keras.ops.convert_to_numpy(self.model.optimizer.iterations))

        def on_train_batch_begin(self, batch, logs=None):
            if not begun_at:
                begun_at.append(self.updates())

        def on_train_batch_end(self, batch, logs=None):
            if len(begun_at) > 1 or self.updates() > begun_at[0]:  # else the batch was skipped
                if len(begun_at) == 1:
                    stamp("step")
                    begun_at.append(-1)
                time.sleep(STEP_SECONDS)

        def on_epoch_end(self, epoch, logs=None):
            self.model.stop_training |= (folder / ENOUGH).exists()

    keras.utils.set_random_seed(1)
    with strategy.scope():
        hidden = [keras.layers.Dense(64, "relu") for _ in range(3)]
        model = keras.Sequential([keras.Input((32,)), *hidden, keras.layers.Dense(4)])
        model.compile("adam", "mse")
    x = np.random.default_rng(0).normal(size=(30 * 60, 32)).astype("float32")
    backup = kd.callbacks.BackupAndRestore(folder / "backups", save_freq=25)
    model.fit(x, x[:, :4], 30, 1_000_000, verbose=0, callbacks=[backup, Stamps()])


class Times:
    """Kills workers of a job, and takes the times."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self.folder, self.options = folder, options
        self.run_id = secrets.token_hex(8)
        self.events: list[dict[str, float]] = []
        self.seen: list[dict[str, float]] = []  # by start: when the first worker and all had ended

    def strike(self) -> None:
        """Kills workers until there are enough events."""
        choice, killed = random.Random(self.options.seed), 0.0
        for attempt in itertools.count():
            now = self.wait_for_step(attempt)
            if attempt:
                self.events.append(self.event(attempt, killed, now))
                print(json.dumps(self.events[-1]), flush=True)
            if attempt == self.options.events:
                break
            time.sleep(self.options.calm)
            self.wait_for_warm()
            victim = choice.choice(now)
            killed = time.time()
            os.kill(int(victim["pid"]), signal.SIGKILL)
        (self.folder / ENOUGH).touch()

    def wait_for_warm(self) -> None:
        """Waits for the process from which new workers are forked, if there is one."""
        until = time.monotonic() + WARM_SECONDS
        name = f"@kerasdist-{self.run_id}"
        while name not in Path("/proc/net/unix").read_text() and time.monotonic() < until:
            time.sleep(0.1)

    def wait_for_step(self, attempt: int) -> list[dict[str, float]]:
        until = time.monotonic() + HANG_SECONDS
        while time.monotonic() < until:
            now = stamps(self.folder, attempt)
            if len(now) == self.options.workers and all("step" in one for one in now):
                return now
            time.sleep(0.05)
        raise TimeoutError(f"no step in start {attempt} after {HANG_SECONDS:g} s")

    def event(self, attempt: int, killed: float, now: list[dict[str, float]]) -> dict[str, float]:
        ends = self.seen[attempt - 1] | {
            part: max(one[part] for one in now) for part in ("began", "imported", "joined", "step")
        }
        before = [killed, *(ends[part] for part in PARTS)]
        parts = {part: ends[part] - last for part, last in zip(PARTS, before, strict=False)}
        return {**parts, "total": ends["step"] - killed}


def measure(folder: Path, options: argparse.Namespace) -> list[dict[str, float]]:
    """Runs the job, and returns the events."""
    from kerasdist.cli.launch.job import Attempt, Launcher
    from kerasdist.cli.launch.spec import JobSpec, python_command

    times = Times(folder, options)
    on_exit, finish = Attempt._on_exit, Attempt._finish

    def stamped_exit(attempt, worker):
        times.seen[-1].setdefault("noticed", time.time())
        on_exit(attempt, worker)

    def stamped_finish(attempt):
        times.seen.append({})
        result = finish(attempt)
        times.seen[-1]["ended"] = time.time()
        return result

    Attempt._on_exit, Attempt._finish = stamped_exit, stamped_finish
    spec = JobSpec(
        python_command(__file__, (str(folder),)),
        workers=options.workers,
        min_workers=1,
        max_restarts=options.events,
        run_id=times.run_id,
        environment={
            "KERAS_BACKEND": options.backend,
            "CUDA_VISIBLE_DEVICES": "",
            "TF_CPP_MIN_LOG_LEVEL": "2",
        },
    )
    said = io.StringIO()
    launcher = Launcher(spec)

    def strike() -> None:
        try:
            times.strike()
        except BaseException:
            launcher.stop()
            raise

    threading.Thread(target=strike, daemon=True).start()
    with contextlib.redirect_stderr(said):
        job = launcher.run()
    (folder / "launcher.log").write_text(said.getvalue())
    if job.exit_code or job.restarts != options.events:
        sys.exit(said.getvalue())
    return times.events


def main() -> None:
    if "KERASDIST_RANK" in os.environ:
        train(Path(sys.argv[1]))
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", choices=BACKENDS, required=True)
    parser.add_argument("--events", type=int, default=5)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--calm", type=float, default=5.0, help="seconds from a step to a kill")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="writes the events to this file")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="kerasdist-restart-"))
    events = measure(folder, options)
    print(f"{options.backend}, {options.workers} workers, {len(events)} kills; seconds:")
    for part, meaning in {**PARTS, "total": "from the kill to the step"}.items():
        values = [event[part] for event in events]
        print(f"{median(values):8.2f} median {max(values):8.2f} worst  {part}: {meaning}")
    if options.json is not None:
        options.json.write_text(json.dumps(events, indent=1))
    print(f"the launcher's output is in {folder}")


if __name__ == "__main__":
    main()
