"""The command ``kerasdist``."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, final

import typer
from typer.core import TyperCommand

from kerasdist._version import __version__
from kerasdist.cluster import addresses
from kerasdist.core.backend_choice import backend_choice
from kerasdist.errors import BackendError, KerasdistError
from kerasdist.job import launcher
from kerasdist.launch import live as live_view
from kerasdist.launch import report
from kerasdist.launch.job import run_job
from kerasdist.launch.placement import counted
from kerasdist.launch.spec import STOP_SECONDS, JobSpec, python_command

_TYPE = re.compile(r" <[a-z\[\]]+>")
_BRACES = re.compile(r"{([A-Z:]+)}")


@final
class _PlainCommand(TyperCommand):
    """A command whose help says ``SCRIPT``; typer writes ``{SCRIPT}`` and ``SCRIPT <str>``."""

    def get_help(self, ctx: Any) -> str:
        """Returns the whole help."""
        text = _BRACES.sub(r"\1", super().get_help(ctx))
        return _TYPE.sub(lambda found: " " * len(found[0]), text)

    def get_usage(self, ctx: Any) -> str:
        """Returns the line of usage, which errors show too."""
        return _BRACES.sub(r"\1", super().get_usage(ctx))


# Everything after the script's name is passed on to the script.
_SCRIPTS_OWN = {"allow_interspersed_args": False, "ignore_unknown_options": False}


def _option(metavar: str | None, text: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, metavar=metavar, help=text, **more)


Arguments = Annotated[
    list[str] | None,
    typer.Argument(metavar="ARGUMENTS", help="Passed to the script.", show_default=False),
]
Devices = Annotated[
    int | None, _option("N", "Number of CPU devices that each worker prepares.", min=1)
]
Hosts = Annotated[
    str | None, _option("HOSTS", "Machines reached by ssh, as in kerasdist run: h1:4,h2:4.")
]
Seconds = Annotated[float, _option("SECONDS", "After how long a job is ended.", min=1.0)]
AsJson = Annotated[bool, _option(None, "Print machine-readable JSON.", "--json")]
Plot = Annotated[Path | None, _option("FILE", "Draw the scaling, with matplotlib.")]


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kerasdist {__version__}")
        raise typer.Exit


app = typer.Typer(
    name="kerasdist",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich's tables give a flag the type <bool>
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def kerasdist(
    *,
    version: Annotated[
        bool, _option(None, "Show the version.", "--version", is_eager=True, callback=_version)
    ] = False,
) -> None:
    """Distributed training for Keras 3: start, plan, check and measure jobs."""


@contextlib.contextmanager
def _errors(exit_code: int) -> Generator[None]:
    """Shows an error of kerasdist's as a line, and ends the command with this code."""
    try:
        yield
    except (KerasdistError, OSError) as error:
        typer.echo(f"kerasdist: {error}", err=True)
        raise typer.Exit(exit_code) from error


@app.command(
    cls=_PlainCommand,
    short_help="Start a script as several workers.",
    context_settings=_SCRIPTS_OWN,
)
def run(
    context: typer.Context,
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="A script, or with -m a module.")],
    arguments: Arguments = None,
    *,
    workers: Annotated[
        str | None,
        _option(
            "N|gpu|A:B",
            "Number of workers; gpu: one per GPU of this machine (default: all slots of "
            "--hosts; without hosts gpu on PyTorch, if there are GPUs, and 1 elsewhere); A:B: up "
            "to B, and the job goes on as long as A are left.",
            "--workers",
            "-n",
        ),
    ] = None,
    devices_per_worker: Devices = None,
    max_restarts: Annotated[
        int, _option("N", "Restart the whole job at most N times after a failure.", min=0)
    ] = 0,
    hosts: Annotated[
        str | None,
        _option("HOSTS", "Machines reached by ssh: h1,h2, or h1:4,h2:4, or gpu[01-16]:8."),
    ] = None,
    join_port: Annotated[
        int | None,
        _option(
            "PORT",
            "With A:B: other machines may join (kerasdist join), by this port; 0: any that is "
            "free. They and this process have the same KERASDIST_SECRET or KERASDIST_SECRET_FILE.",
            min=0,
        ),
    ] = None,
    logs: Annotated[
        Path | None,
        _option(
            "FOLDER",
            "Write one log file per attempt and worker here, and the state of all workers "
            "to status.json (default: the terminal).",
            "--log-dir",
            "--logs",
        ),
    ] = None,
    live: Annotated[
        Literal["auto", "on", "off"],
        _option("auto|on|off", "A table of all workers, kept up to date; auto: on a terminal."),
    ] = "auto",
    profile: Annotated[
        str | None,
        _option("FIRST:LAST", "Profile these steps of fit on every worker, for example 10:20."),
    ] = None,
    profile_dir: Annotated[
        Path, _option("FOLDER", "The folder of the profile, trace.json.gz.")
    ] = Path("profile"),
    timeout_on_stop: Annotated[
        float, _option("SECONDS", "Time from SIGTERM to SIGKILL.", min=0.0)
    ] = STOP_SECONDS,
    env: Annotated[
        list[str] | None,
        _option(
            "NAME[=VALUE]",
            "A variable for all workers; without =VALUE, with the value that it has here, "
            "which then stands in no process list. May be given several times.",
            show_default=False,
        ),
    ] = None,
    python: Annotated[
        str | None, _option("PATH", "The workers' interpreter (default: this one).")
    ] = None,
    module: Annotated[bool, _option(None, "SCRIPT is a module.", "-m")] = False,
    only_show: Annotated[
        bool,
        _option(
            None, "Start nothing; print each worker's host, variables and command.", "--dry-run"
        ),
    ] = False,
) -> None:
    """Start a script as several workers, and end them all when one fails.

    Options of kerasdist come before the script: kerasdist run --workers 2 train.py.
    """
    _warn_of_misplaced_options(context, script, arguments or ())
    least, most = _range_of(workers)
    spec = JobSpec(
        command=python_command(script, arguments or (), module=module, python=python),
        workers=most,
        min_workers=least,
        devices_per_worker=devices_per_worker,
        max_restarts=max_restarts,
        hosts=_listed(hosts),
        join_port=join_port,
        logs=logs,
        live=live == "on" or (live == "auto" and live_view.is_possible()),
        profile=None if profile is None else _profiled(profile, profile_dir),
        stop_seconds=timeout_on_stop,
        environment=dict(_variable(each) for each in env or ()),
    )
    # A backend that is missing here may be installed elsewhere.
    choice = backend_choice(spec.variables)
    with _errors(1):
        if not choice.is_keras_backend:
            raise BackendError(choice.problem)
        if only_show:
            typer.echo(report.of_dry_run(spec))
            return
        raise typer.Exit(run_job(spec).exit_code)


@app.command(cls=_PlainCommand, short_help="Add this machine to a job that is running.")
def join(
    launcher: Annotated[
        str, typer.Argument(metavar="HOST:PORT", help="What kerasdist run says, with --join-port.")
    ],
    *,
    workers: Annotated[
        str | None,
        _option(
            "N|gpu",
            "Number of workers here; gpu: one per GPU (default: gpu on PyTorch, if there are "
            "GPUs, and 1 elsewhere).",
            "--workers",
            "-n",
        ),
    ] = None,
) -> None:
    """Add this machine to a job of kerasdist run --workers A:B --join-port PORT.

    The job takes its workers in at the next backup, up to B, and this command ends with the job.
    This machine has the job's KERASDIST_SECRET or KERASDIST_SECRET_FILE, and the same script,
    interpreter and packages at the same paths: run it in the folder of kerasdist run.
    """
    from kerasdist.launch.elastic.machine import Machine

    with _errors(1):
        host, port = addresses.split(launcher, "HOST:PORT")
        count = counted(JobSpec((), _number_of(workers))).workers
        assert isinstance(count, int)
        raise typer.Exit(Machine(host, port, count).serve())


@app.command(short_help="Show the cluster that is detected, and what is installed.")
def info(*, json: AsJson = False) -> None:
    """Show which cluster is detected here, and why; and what is installed."""
    from kerasdist.checks import info as information

    facts = information.gather()
    if json:
        typer.echo(information.as_json(facts))
    else:
        information.show(facts)
    raise typer.Exit(0 if facts.error is None and facts.backend_problem is None else 1)


@app.command(cls=_PlainCommand, short_help="Predict memory and time on accelerators.")
def plan(
    script: Annotated[
        str,
        typer.Argument(
            metavar="SCRIPT",
            help="A script, or module:function, which returns a compiled model and a batch.",
        ),
    ],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- ARGUMENTS", help="Passed to the script.", show_default=False),
    ] = None,
    *,
    devices: Annotated[str, _option("TARGET", "8xh100, 2x8xh100, v5e:4x4, v5p:16x16x16, ...")],
    batch_per_device: Annotated[
        int | None,
        _option("N", "Examples on a device (default: the script's batch, divided).", min=1),
    ] = None,
    sharding: Annotated[
        Literal["optimizer", "full"] | None,
        _option(
            "optimizer|full",
            "What replicas divide among them (default: as the script's strategy has it).",
        ),
    ] = None,
    step_time: Annotated[
        float | None,
        _option(
            "MILLISECONDS",
            "A step on one device, measured (default: what the chip allows).",
            min=0.0,
        ),
    ] = None,
    network_efficiency: Annotated[
        float,
        _option(
            "PART", "Of the known rate between machines, or slices, what is reached.", min=0.01
        ),
    ] = 1.0,
    largest_batch: Annotated[
        bool, _option(None, "Whether to look for the largest batch that fits.")
    ] = True,
    json: AsJson = False,
    plot: Plot = None,
) -> None:
    """Show what training needs and takes on accelerators that are not here.

    The script runs up to its first training step, on JAX, whichever backend it names. XLA compiles
    that step for the accelerators.
    """
    with _errors(2):
        from kerasdist.plan import command

        options = command.PlanOptions(
            script=script,
            arguments=arguments or (),
            devices=devices,
            batch_per_device=batch_per_device,
            sharding=sharding,
            step_time=step_time,
            network_efficiency=network_efficiency,
            largest_batch=largest_batch,
            as_json=json,
            plot=plot,
        )
        raise typer.Exit(0 if command.run(options) else 1)


@app.command("test", short_help="Compare a short training with one device.")
def compare(
    *,
    backend: Annotated[
        list[str] | None,
        _option(
            "NAME",
            "tensorflow, jax or torch; may be given several times (default: all installed).",
            show_default=False,
        ),
    ] = None,
    workers: Annotated[
        str | None,
        _option(
            "N|gpu",
            "Number of workers (default: as kerasdist run; 2 on a machine without accelerators).",
            "--workers",
            "-n",
        ),
    ] = None,
    hosts: Hosts = None,
    devices_per_worker: Devices = None,
    timeout: Seconds = 300.0,
    json: AsJson = False,
) -> None:
    """Train for some seconds here, and compare the weights with one device.

    For each backend a job of this machine, or of --hosts, sums, gathers and broadcasts, measures
    the bandwidth, and trains 20 steps. The exit code is 1 if something is wrong.
    """
    with _errors(2):
        from kerasdist.checks import jobs

        place = jobs.Place(_number_of(workers), _listed(hosts), devices_per_worker, timeout)
        raise typer.Exit(0 if jobs.test(backend or (), place, as_json=json) else 1)


@app.command(short_help="Find what would stop or slow a job.")
def doctor(*, hosts: Hosts = None, json: AsJson = False) -> None:
    """Look for what would stop or slow a job on this machine, or on --hosts and between them.

    Versions, devices, links, ports, names, disks, shared memory and limits, and what each
    means for a job. The exit code is 1 if there is a problem, 0 with warnings.
    """
    with _errors(2):
        from kerasdist.checks.hosts import doctor

        raise typer.Exit(0 if doctor(_listed(hosts), as_json=json) else 1)


@app.command(
    cls=_PlainCommand, short_help="Measure how training scales here.", context_settings=_SCRIPTS_OWN
)
def bench(
    script: Annotated[
        str | None,
        typer.Argument(metavar="SCRIPT", help="A script (default: a model of kerasdist's own)."),
    ] = None,
    arguments: Arguments = None,
    *,
    backend: Annotated[
        str | None, _option("NAME", "tensorflow, jax or torch (default: Keras's choice).")
    ] = None,
    workers: Annotated[
        str | None,
        _option(
            "N,N,...",
            "Numbers of workers (default: 1, 2, 4, ... up to the GPUs, slots or cores).",
            "--workers",
            "-n",
        ),
    ] = None,
    hosts: Hosts = None,
    timeout: Seconds = 900.0,
    json: AsJson = False,
    plot: Plot = None,
) -> None:
    """Measure how training scales on this machine, or on --hosts.

    The script, or a model of kerasdist's own, is trained by 1, 2, ... workers; its throughput, and
    the bandwidth between the replicas beside what the links allow, are shown. A script is run as it
    is, and the longest of its fits counts.
    """
    with _errors(2):
        from kerasdist.checks import bench as scaling

        options = scaling.BenchOptions(
            script=script,
            arguments=arguments or (),
            backend=backend,
            workers=_numbers(workers),
            hosts=_listed(hosts),
            seconds=timeout,
            as_json=json,
            plot=plot,
        )
        raise typer.Exit(0 if scaling.run(options) else 1)


def _warn_of_misplaced_options(
    context: typer.Context, script: str, arguments: Sequence[str]
) -> None:
    """Warns where the script gets an option of kerasdist that kerasdist did not get.

    No error: a script may have a ``--workers`` of its own.
    """
    given = {word.partition("=")[0] for word in arguments if word.startswith("-")}
    for option in context.command.params:
        names = given & {name for name in option.opts if name != "-m"}
        source = context.get_parameter_source(str(option.name))
        if names and source is not None and source.name == "DEFAULT":
            name = min(names)
            typer.echo(
                f"[kerasdist] warning: {name} stands after the script's name, so {script} gets it, "
                f"and kerasdist does not. If you meant kerasdist's option, write it before: "
                f"kerasdist run {name} ... {script}",
                err=True,
            )


def _listed(hosts: str | None) -> tuple[str, ...]:
    return () if hosts is None else (hosts,)


def _range_of(text: str | None) -> tuple[int | None, int | Literal["gpu"] | None]:
    """Returns the least and the largest number of workers; the first is None if it is the same."""
    words = (text or "").split(":")
    if len(words) != 2:
        return None, _number_of(text)
    if not all(word.isdecimal() for word in words) or not 1 <= int(words[0]) <= int(words[1]):
        raise typer.BadParameter(
            f"expected A:B, two numbers from 1, the second at least the first, received {text!r}",
            param_hint="--workers",
        )
    return int(words[0]), int(words[1])


def _number_of(text: str | None) -> int | Literal["gpu"] | None:
    if text is None or text == "gpu":
        return text
    if not text.isdecimal() or int(text) < 1:
        raise typer.BadParameter(
            f"expected a number from 1, or gpu, received {text!r}", param_hint="--workers"
        )
    return int(text)


def _numbers(text: str | None) -> tuple[int, ...]:
    words = [] if text is None else text.split(",")
    if not all(word.isdecimal() and int(word) for word in words):
        raise typer.BadParameter(
            f"expected numbers from 1, such as 1,2,4, received {text!r}", param_hint="--workers"
        )
    return tuple(sorted({int(word) for word in words}))


def _profiled(text: str, folder: Path) -> launcher.ProfiledSteps:
    try:
        return launcher.parsed(text, folder)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--profile") from error


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals and name in os.environ:
        return name, os.environ[name]
    if not name or not equals:
        raise typer.BadParameter(
            f"expected NAME=VALUE, or the NAME of a variable that is set, received {text!r}",
            param_hint="--env",
        )
    return name, value


def main() -> None:
    """Runs the command line."""
    try:
        app()
    finally:
        # Where the reader has gone away (`| head`), Python's own last flush would turn the exit
        # code into 120: https://docs.python.org/3/library/signal.html#note-on-sigpipe
        try:
            sys.stdout.flush()
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
