"""Is anything lost of a training run whose workers are killed again and again?

    python benchmarks/soak.py --backend torch [--kills 20] [--workers 2] [--seed 0] [--json FILE]

A run (soaking/training.py) goes to its end without a disturbance. What it trains on and beside
which callbacks, the seed chooses (soaking/jobs.py). The same run is then started by
the launcher with restarts, and a killer strikes a random worker by SIGKILL, or by SIGSTOP one time
in four: as the script starts, as the first step is compiled, in an epoch, in validation, while a
backup is written. What the second run ends with must be what the first did: weights, the state of
the optimizer, seeds, metrics, the history; to the last bit, since both add the same numbers in the
same order. The exit status is 0 if nothing was lost.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from soaking.killer import Killer
from soaking.marks import PHASES, read
from soaking.verdict import differences, result

from kerasdist.launch.job import Launcher
from kerasdist.launch.spec import JobResult, JobSpec, python_command

BACKENDS = ("tensorflow", "jax", "torch")
TRAINING = Path(__file__).with_name("soaking") / "training.py"

SPARE_RESTARTS = 3
"""More than the kills; a job that needs one has failed by itself, which is a loss."""

STOP_SECONDS = 3.0

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
    killer: Killer
    seconds: float


def run(folder: Path, options: argparse.Namespace, kills: int, lengths: Mapping[str, float]) -> Run:
    (folder / "marks").mkdir(parents=True)
    arguments = (str(folder), str(options.epochs or 2 * options.kills + 5), str(options.seed))
    spec = JobSpec(
        python_command(str(TRAINING), arguments),
        workers=options.workers,
        max_restarts=kills + SPARE_RESTARTS if kills else 0,
        logs=folder / "logs",
        stop_seconds=STOP_SECONDS,
        environment={**ENVIRONMENT, "KERAS_BACKEND": options.backend},
    )
    launcher = Launcher(spec)
    began = time.monotonic()
    with (folder / "launcher.log").open("w", encoding="utf-8") as log:
        killer = Killer(folder / "marks", kills, lengths, options.seed, launcher.stop)
        with killer, contextlib.redirect_stderr(log):
            job = launcher.run()
    return Run(folder, job, killer, time.monotonic() - began)


def running(interrupted: Run) -> list[int]:
    """Returns which workers of any start have not ended."""
    attempts = range(len(interrupted.job.attempts))
    marks = [mark for attempt in attempts for mark in read(interrupted.folder / "marks", attempt)]
    return [mark.pid for mark in marks if Path(f"/proc/{mark.pid}").exists()]


def losses(expected: Run, interrupted: Run, options: argparse.Namespace) -> list[str]:
    """Returns all that is not as in the run without a disturbance."""
    lost = list(interrupted.killer.hung)
    if (kills := len(interrupted.killer.strikes)) < options.kills:
        lost.append(f"only {kills} of {options.kills} kills happened; raise --epochs")
    if (restarts := interrupted.job.restarts) > kills:
        lost.append(f"the job failed {restarts - kills} times by itself")
    if interrupted.job.exit_code:
        return [*lost, f"the job ended with exit code {interrupted.job.exit_code}"]
    for rank in range(options.workers):
        pair = result(expected.folder, rank), result(interrupted.folder, rank)
        lost += [f"worker {rank}: {line}" for line in differences(*pair)]
    left = sorted(path.name for path in (interrupted.folder / "backups").iterdir())
    lost += [f"left in the folder of the backups: {name}" for name in left]
    lost += [f"process {pid} is still running" for pid in running(interrupted)]
    return lost


def report(interrupted: Run, lost: list[str], options: argparse.Namespace) -> dict[str, object]:
    struck = interrupted.killer.strikes
    phases = Counter(one.phase for one in struck)
    signals = Counter(one.number.name for one in struck)
    longest = {
        name: max((one.seconds for one in struck if one.number.name == name), default=0.0)
        for name in signals
    }
    return {
        "backend": options.backend,
        "workers": options.workers,
        "seed": options.seed,
        "kills": len(struck),
        "kills by phase": {phase: phases[phase] for phase in PHASES},
        "kills by signal": dict(signals),
        "kills of the chief": sum(one.victim.rank == 0 for one in struck),
        "restarts": interrupted.job.restarts,
        "longest time from a kill to the next start, in seconds": longest,
        "seconds": interrupted.seconds,
        "lost": lost,
    }


def show(facts: dict[str, object]) -> None:
    table = Table(title=f"{facts['backend']}: a run of {facts['workers']} workers under fire")
    table.add_column("what")
    table.add_column("figure", justify="right")
    for name, value in facts.items():
        if isinstance(value, dict):
            for key, figure in value.items():
                table.add_row(f"{name}: {key}", f"{figure:.3g}")
        elif name not in ("backend", "workers", "lost"):
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
    parser.add_argument("--workers", type=int, default=2)
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
    expected = run(folder / "undisturbed", options, 0, {})
    if expected.job.exit_code:
        print((expected.folder / "launcher.log").read_text(encoding="utf-8"))
        return 1
    results = [result(expected.folder, rank) for rank in range(options.workers)]
    # A phase that is on some workers alone, as that of the backups, has no length on the others.
    lengths = {phase: max(one.lengths.get(phase, 0.0) for one in results) for phase in PHASES}
    interrupted = run(folder / "interrupted", options, options.kills, lengths)
    lost = losses(expected, interrupted, options)
    facts = report(interrupted, lost, options)
    show(facts)
    if options.json is not None:
        options.json.write_text(json.dumps(facts, indent=2), encoding="utf-8")
    print(f"logs are in {folder}")
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
