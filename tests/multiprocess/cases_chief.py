"""What the chief does for all workers, or before them."""

import contextlib
import io
import logging
import time

from tests.conformance.cases_check import checked
from tests.conformance.lazy import kd
from tests.conformance.registry import case


@case("workers")
def is_chief_and_print(lab):
    """`strategy.is_chief`; `kd.print` prints on the chief alone, with the arguments of `print`."""
    strategy, extended = lab.strategy(), lab.strategy().extended
    lab.equal(lab.everyone(strategy.is_chief), [rank == 0 for rank in range(lab.job.num_workers)])
    saves = extended.should_checkpoint, extended.should_save_summary
    lab.equal(saves, (strategy.is_chief,) * 2)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        kd.print("loss", 0.5, sep=" = ", end=".\n")
    lab.equal(printed.getvalue(), "loss = 0.5.\n" if lab.job.is_chief else "")
    with io.StringIO() as file:
        kd.print("to a file", file=file)
        lab.equal(file.getvalue(), "to a file\n" if lab.job.is_chief else "")


@case("workers")
def chief_first(lab):
    """`strategy.chief_first`: the chief's block has ended when those of the others begin."""
    with lab.folder() as folder:
        file = folder / "downloaded"
        for text in ("once", "twice"):
            with lab.strategy().chief_first():
                if lab.job.is_chief:
                    time.sleep(0.3)
                    file.write_text(text, encoding="utf-8")
                seen = file.read_text(encoding="utf-8") if file.exists() else "nothing"
            lab.equal(lab.everyone(seen), [text] * lab.job.num_workers)


@case("workers")
def chief_first_that_fails(lab):
    """An error of the chief's block is raised on the chief; the others are told of it."""
    ran = False
    error = OSError if lab.job.is_chief else kd.errors.WorkerLostError
    with lab.raises(error, "no space left"), lab.strategy().chief_first():
        ran = True
        raise OSError("no space left")
    lab.equal(lab.everyone(ran), [rank == 0 for rank in range(lab.job.num_workers)])
    with lab.strategy().chief_first():  # the job goes on
        ran = "again"
    lab.alike(ran)


@case("workers")
def a_strategy_is_logged(lab):
    """The logger `kerasdist` has one line for a strategy: name, replicas, workers, devices."""
    with checked(logging.INFO) as lines:
        strategy = lab.strategy(check="off")
    [line] = lines
    lab.check(line.startswith("MultiWorkerMirroredStrategy: "), line)
    rank, workers = lab.job.rank, lab.job.num_workers
    replicas = f"{strategy.num_replicas_in_sync} replicas of {workers} workers; worker {rank} on "
    lab.check(replicas in line, line)
    lab.check(", ".join(strategy.extended.worker_devices) in line, line)
