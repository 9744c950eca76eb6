"""Is anything lost of a training run whose workers are killed again and again?

    python benchmarks/soak.py --backend torch [--kills 20] [--workers 2] [--seed 0] [--json FILE]
    python benchmarks/soak.py --backend torch --elastic [--events 200] [--mtbf 20]

A run (soaking/training.py) goes to its end without a disturbance. What it trains on and beside
which callbacks, the seed chooses (soaking/jobs.py). The same run is then started by
the launcher with restarts, and a killer strikes a random worker by SIGKILL, or by SIGSTOP one time
in four: as the script starts, as the first step is compiled, in an epoch, in validation, while a
backup is written. What the second run ends with must be what the first did: weights, the state of
the optimizer, seeds, metrics, the history; to the last bit, since both add the same numbers in the
same order. The exit status is 0 if nothing was lost.

With ``--elastic`` there are up to three workers, on two hosts and on a machine that joins by itself
over a cable that can be cut, and the job goes on with those that are left (soaking/events.py). It
ends with the epoch in which enough has happened, and is then compared with a run of so many epochs
on one device: in float64, to 1e-9, as another number of workers adds in another order. It takes
root, for the network.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table
from soaking.events import KINDS, Events
from soaking.killer import HANG_SECONDS, Killer, Striker
from soaking.marks import PHASES, read
from soaking.network import HOSTS, PORT, SECRET, Machine, move_into_one
from soaking.verdict import differences, furthest, result, steps

from kerasdist.cli.launch.elastic import slots
from kerasdist.cli.launch.job import Launcher
from kerasdist.cli.launch.spec import JobResult, JobSpec, python_command
from tests.multiprocess import hosts

BACKENDS = ("tensorflow", "jax", "torch")
TRAINING = Path(__file__).with_name("soaking") / "training.py"

SPARE_RESTARTS = 3
"""More than the kills; a job that needs one has failed by itself, which is a loss."""

STOP_SECONDS = 3.0

TOLERANCE = 1e-9
"""Of a job of a changing size; rounding makes 1e-13 of some hundred steps."""

AWAY_SECONDS = 20.0
"""How long a slot is left out that has failed twice without a backup, as many do here: less than it
takes until the job is said to hang."""

ENDLESS = 1_000_000

ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "KERASDIST_HEARTBEAT_TIMEOUT": "5",
    "KERASDIST_JOIN_TIMEOUT": "60",
    "KERASDIST_MEETING_TIMEOUT": "90",
    "TF_CPP_MIN_LOG_LEVEL": "2",
}


@dataclass(frozen=True)
class Run:
    """A run of the training script: its folder, how the job ended, and what was done to it."""

    folder: Path
    job: JobResult
    cause: Any
    seconds: float


def run(
    folder: Path,
    options: argparse.Namespace,
    epochs: int,
    strike: Callable[[Launcher], Striker | None],
    kind: Sequence[str] = (),
    **more: Any,
) -> Run:
    (folder / "marks").mkdir(parents=True)
    arguments = (str(folder), str(epochs), str(options.seed), *kind)
    own = {**ENVIRONMENT, "KERAS_BACKEND": options.backend, **more.pop("environment", {})}
    more = {"workers": options.workers, "environment": own, **more}
    command = python_command(str(TRAINING), arguments)
    spec = JobSpec(command, logs=folder / "logs", stop_seconds=STOP_SECONDS, **more)
    launcher = Launcher(spec)
    began = time.monotonic()
    with (folder / "launcher.log").open("w", encoding="utf-8") as log:
        cause = strike(launcher)
        with cause or contextlib.nullcontext(), contextlib.redirect_stderr(log):
            job = launcher.run()
    if cause is None and job.exit_code:
        sys.exit((folder / "launcher.log").read_text(encoding="utf-8"))
    return Run(folder, job, cause, time.monotonic() - began)


def running(interrupted: Run) -> list[int]:
    """Returns which workers of any start have not ended."""
    attempts = range(len(interrupted.job.attempts))
    marks = [mark for attempt in attempts for mark in read(interrupted.folder / "marks", attempt)]
    return [mark.pid for mark in marks if is_worker(mark.pid)]


def is_worker(pid: int) -> bool:
    """Returns whether this is a worker's process; in two hours another one gets its number."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8")
    except OSError:
        return False
    return TRAINING.name in command or "kerasdist.launch" in command


def losses(expected: Run, interrupted: Run, tolerance: float) -> list[str]:
    """Returns all that is not as in the run without a disturbance."""
    lost = []
    alone = len(expected.job.attempts[-1].endings) == 1
    for each in interrupted.job.attempts[-1].endings:
        of_rank = 0 if alone else each.rank
        pair = result(expected.folder, of_rank), result(interrupted.folder, each.rank)
        lost += [f"worker {each.rank}: {line}" for line in differences(*pair, tolerance)]
    left = sorted(path.name for path in (interrupted.folder / "backups").iterdir())
    lost += [f"left in the folder of the backups: {name}" for name in left]
    lost += [f"process {pid} is still running" for pid in running(interrupted)]
    return lost


def failures(interrupted: Run, done: int, wanted: int, harmless: int = 0) -> list[str]:
    """Returns why the run that was interrupted is not what it should be, or cannot be compared."""
    lost = list(interrupted.cause.hung)
    if done < wanted:
        lost.append(f"only {done} of {wanted} happened; raise --epochs")
    failed = sum(attempt.failed for attempt in interrupted.job.attempts)
    if (by_itself := failed - done + harmless) > 0:
        lost.append(f"the job failed {by_itself} times by itself")
    if interrupted.job.exit_code:
        lost.append(f"the job ended with exit code {interrupted.job.exit_code}")
    return lost


def of_plain(
    undisturbed: Path, interrupted: Path, options: argparse.Namespace
) -> tuple[list[str], dict[str, object]]:
    """Runs the training, and again while workers are killed; returns what is lost, and facts."""
    epochs = options.epochs or 2 * options.kills + 5
    expected = run(undisturbed, options, epochs, lambda _: None)
    results = [result(undisturbed, rank) for rank in range(options.workers)]
    # A phase that is on some workers alone, as that of the backups, has no length on the others.
    lengths = {phase: max(one.lengths.get(phase, 0.0) for one in results) for phase in PHASES}

    def strike(launcher: Launcher) -> Killer:
        return Killer(interrupted / "marks", options.kills, lengths, options.seed, launcher.stop)

    restarts = options.kills + SPARE_RESTARTS
    found = run(interrupted, options, epochs, strike, max_restarts=restarts)
    struck = found.cause.strikes
    lost = failures(found, len(struck), options.kills)
    if not found.job.exit_code:
        lost += losses(expected, found, 0.0)
    phases = Counter(one.phase for one in struck)
    signals = Counter(one.number.name for one in struck)
    longest = {
        name: max((one.seconds for one in struck if one.number.name == name), default=0.0)
        for name in signals
    }
    return lost, {
        "workers": options.workers,
        "kills": len(struck),
        "kills by phase": {phase: phases[phase] for phase in PHASES},
        "kills by signal": dict(signals),
        "kills of the chief": sum(one.victim.rank == 0 for one in struck),
        "restarts": found.job.restarts,
        "longest time from a kill to the next start, in seconds": longest,
        "seconds": found.seconds,
    }


def of_elastic(
    undisturbed: Path, interrupted: Path, options: argparse.Namespace
) -> tuple[list[str], dict[str, object]]:
    """Runs the training while hosts go and come, and as many epochs of it without."""
    slots.AWAY_SECONDS = AWAY_SECONDS
    move_into_one()
    interrupted.mkdir(parents=True)
    with_ssh = hosts.make(interrupted)
    os.environ["PATH"] = with_ssh.pop("PATH")  # where the launcher finds its ssh
    machine = Machine(interrupted, with_ssh)

    def strike(launcher: Launcher) -> Events:
        plan = options.events, 60 * options.minutes, options.mtbf, options.seed
        return Events(interrupted, machine, *plan, launcher.stop)

    more = {
        "workers": len(HOSTS) + 1,
        "min_workers": 1,
        "max_restarts": options.events + SPARE_RESTARTS,
        "hosts": HOSTS,
        "join_port": PORT,
        "environment": {**with_ssh, "KERASDIST_SECRET": SECRET},
    }
    found = run(interrupted, options, ENDLESS, strike, ("elastic",), **more)
    lost = machine.end(HANG_SECONDS)
    events = found.cause.events
    facts: dict[str, object] = {
        "events": len(events),
        "events by kind": dict(Counter(one.kind for one in events)),
        "changes of size": sum(one.before != one.after for one in events),
        "restarts": found.job.restarts,
        "seconds": found.seconds,
    }
    for kind in KINDS:
        for what in ("start", "step"):
            times = [getattr(one, what) for one in events if one.kind == kind]
            if times := [each for each in times if each is not None]:
                figures = {"median": median(times), "longest": max(times)}
                facts[f"seconds from {kind} to the next {what}"] = figures
    enough = options.events if options.minutes == math.inf else 1
    harmless = sum(one.kind in ("return", "join") for one in events)
    lost += failures(found, len(events), enough, harmless)
    if not found.job.exit_code:
        epochs = len(result(interrupted, 0).epochs)
        calm = {"workers": 1, "environment": with_ssh}
        expected = run(undisturbed, options, epochs, lambda _: None, ("elastic", "calm"), **calm)
        lost += losses(expected, found, TOLERANCE)
        pair = result(undisturbed, 0), result(interrupted, 0)
        more_steps = steps(pair[1]) - steps(pair[0])
        facts |= {"epochs": epochs, "steps": steps(pair[0])}
        facts |= {"lost steps": max(0, -more_steps), "doubled steps": max(0, more_steps)}
        facts["largest difference"] = furthest(*pair)
    return lost, facts


def show(facts: dict[str, object]) -> None:
    table = Table(title=f"{facts['backend']}: a run under fire")
    table.add_column("what")
    table.add_column("figure", justify="right")
    for name, value in facts.items():
        if isinstance(value, dict):
            for key, figure in value.items():
                table.add_row(f"{name}: {key}", f"{figure:.3g}")
        elif name not in ("backend", "lost"):
            table.add_row(name, f"{value:.4g}")
    table.add_row("lost", str(len(facts["lost"])))
    console = Console(width=110)
    console.print(table)
    for line in facts["lost"]:
        console.print(f"LOST {line}", markup=False, soft_wrap=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", choices=BACKENDS, default=os.environ.get("KERAS_BACKEND"))
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--elastic", action="store_true", help="hosts go and come")
    parser.add_argument("--events", type=int, default=200, help="with --elastic")
    parser.add_argument(
        "--mtbf", type=float, default=20.0, help="mean seconds from a start to the next event"
    )
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="with --elastic: then fewer events do"
    )
    parser.add_argument("--workers", type=int, default=2, help="without --elastic")
    parser.add_argument("--seed", type=int, default=0, help="of the plan and of the training")
    parser.add_argument(
        "--epochs", type=int, help="of the training; default: twice the kills, and five"
    )
    parser.add_argument("--folder", type=Path, help="keeps logs and results in a new folder")
    parser.add_argument("--json", type=Path, help="writes the figures to this file")
    options = parser.parse_args()
    if options.backend is None:
        parser.error("name a --backend, or set KERAS_BACKEND")
    folder = options.folder or Path(tempfile.mkdtemp(prefix="kerasdist-soak-"))
    compare = of_elastic if options.elastic else of_plain
    lost, facts = compare(folder / "undisturbed", folder / "interrupted", options)
    names = ("backend", "seed")
    facts = {**{name: getattr(options, name) for name in names}, **facts, "lost": lost}
    show(facts)
    if options.json is not None:
        options.json.write_text(json.dumps(facts, indent=2), encoding="utf-8")
    print(f"logs are in {folder}")
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
