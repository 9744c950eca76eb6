"""The command ``kerasdist`` with all its subcommands."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from kerasdist.cli.diagnostics import bench, hosts, info, jobs
from kerasdist.cli.launch import live as live_view
from kerasdist.cli.launch import report
from kerasdist.cli.launch.elastic.joining import Machine
from kerasdist.cli.launch.job import run_job
from kerasdist.cli.launch.placement import counted
from kerasdist.cli.launch.spec import STOP_SECONDS, JobSpec, python_command
from kerasdist.cli.options import (
    Arguments,
    Devices,
    PlainCommand,
    listed,
    number_of_workers,
    option,
    showing_errors,
)
from kerasdist.cli.plan import command
from kerasdist.cluster import addresses
from kerasdist.core import __version__
from kerasdist.core.backend_choice import backend_choice
from kerasdist.errors import BackendError
from kerasdist.job import launcher

# All arguments after the name of the script are passed to the script.
_SCRIPTS_OWN = {"allow_interspersed_args": False, "ignore_unknown_options": False}


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kerasdist {__version__}")
        raise typer.Exit


app = typer.Typer(
    name="kerasdist",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # the help tables of rich would show <bool> beside each flag
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def kerasdist(
    *,
    version: Annotated[
        bool, option(None, "Show the version.", "--version", is_eager=True, callback=_version)
    ] = False,
) -> None:
    """Distributed training for Keras 3: start, plan, check and measure jobs."""


@app.command(
    cls=PlainCommand, short_help="Start a script as several workers.", context_settings=_SCRIPTS_OWN
)
def run(
    context: typer.Context,
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="A script, or with -m a module.")],
    arguments: Arguments = None,
    *,
    workers: Annotated[
        str | None,
        option(
            "N|gpu|A:B",
            "Number of workers; gpu: one per GPU of this machine; A:B: up to B, and the job "
            "continues while at least A are left. Default: with --hosts, the sum of its numbers; "
            "otherwise one per GPU on PyTorch, and 1 on other backends or without GPUs.",
            "--workers",
            "-n",
        ),
    ] = None,
    devices_per_worker: Devices = None,
    max_restarts: Annotated[
        int, option("N", "Restart the whole job at most N times after a failure.", min=0)
    ] = 0,
    hosts: Annotated[
        str | None,
        option("HOSTS", "Machines reached by ssh: h1,h2, or h1:4,h2:4, or gpu[01-16]:8."),
    ] = None,
    join_port: Annotated[
        int | None,
        option(
            "PORT",
            "With A:B: the port by which other machines may join (kerasdist join); 0: any free "
            "port. All machines need the same KERASDIST_SECRET or KERASDIST_SECRET_FILE.",
            min=0,
        ),
    ] = None,
    logs: Annotated[
        Path | None,
        option(
            "FOLDER",
            "Write one log file per attempt and worker here, and the state of all workers "
            "to status.json (default: the terminal).",
            "--log-dir",
            "--logs",
        ),
    ] = None,
    live: Annotated[
        Literal["auto", "on", "off"],
        option("auto|on|off", "Show a table of all workers while they run; auto: on a terminal."),
    ] = "auto",
    profile: Annotated[
        str | None,
        option("FIRST:LAST", "Profile these steps of fit on every worker, for example 10:20."),
    ] = None,
    profile_dir: Annotated[
        Path, option("FOLDER", "The folder in which the profile, trace.json.gz, is written.")
    ] = Path("profile"),
    timeout_on_stop: Annotated[
        float, option("SECONDS", "The time that workers have from SIGTERM to SIGKILL.", min=0.0)
    ] = STOP_SECONDS,
    env: Annotated[
        list[str] | None,
        option(
            "NAME[=VALUE]",
            "A variable for all workers. Without =VALUE, they get the value that it has in this "
            "process, and no process list shows the value. May be given several times.",
            show_default=False,
        ),
    ] = None,
    python: Annotated[
        str | None, option("PATH", "The workers' interpreter (default: this one).")
    ] = None,
    module: Annotated[bool, option(None, "SCRIPT is a module.", "-m")] = False,
    only_show: Annotated[
        bool,
        option(
            None, "Start nothing; print each worker's host, variables and command.", "--dry-run"
        ),
    ] = False,
) -> None:
    """Start a script as several workers, and end all workers when one fails.

    Options of kerasdist come before the script: kerasdist run --workers 2 train.py.
    """
    _warn_of_misplaced_options(context, script, arguments or [])
    least, most = _range_of(workers)
    spec = JobSpec(
        command=python_command(script, arguments or (), module=module, python=python),
        workers=most,
        min_workers=least,
        devices_per_worker=devices_per_worker,
        max_restarts=max_restarts,
        hosts=listed(hosts),
        join_port=join_port,
        logs=logs,
        live=live == "on" or (live == "auto" and live_view.is_possible()),
        profile=None if profile is None else _profiled(profile, profile_dir),
        stop_seconds=timeout_on_stop,
        environment=dict(_variable(each) for each in env or ()),
    )
    # Only the backend's name is checked, and not whether the backend is installed on this machine,
    # because the workers may run on other machines.
    choice = backend_choice(spec.variables)
    with showing_errors(1):
        if not choice.is_keras_backend:
            raise BackendError(choice.problem)
        if only_show:
            typer.echo(report.of_dry_run(spec))
            return
        raise typer.Exit(run_job(spec).exit_code)


@app.command(cls=PlainCommand, short_help="Add this machine to a job that is running.")
def join(
    launcher: Annotated[
        str, typer.Argument(metavar="HOST:PORT", help="As printed by kerasdist run --join-port.")
    ],
    *,
    workers: Annotated[
        str | None,
        option(
            "N|gpu",
            "Number of workers here; gpu: one per GPU (default: gpu on PyTorch, if there are "
            "GPUs, and 1 elsewhere).",
            "--workers",
            "-n",
        ),
    ] = None,
) -> None:
    """Add this machine to a job of kerasdist run --workers A:B --join-port PORT.

    The job adds this machine's workers at the next backup, up to B workers in all, and this command
    ends with the job. This machine needs the job's KERASDIST_SECRET or KERASDIST_SECRET_FILE, and
    the same script, interpreter and packages at the same paths: run the command in the same folder.
    """
    with showing_errors(1):
        host, port = addresses.split(launcher, "HOST:PORT")
        count = counted(JobSpec((), number_of_workers(workers))).workers
        assert isinstance(count, int)
        raise typer.Exit(Machine(host, port, count).serve())


# Each of the other commands is a function of another module.
app.command(short_help="Show the cluster that is detected, and what is installed.")(info.info)
app.command(cls=PlainCommand, short_help="Predict memory and time on accelerators.")(
    showing_errors(2)(command.plan)
)
app.command("test", short_help="Compare a short training with one device.")(
    showing_errors(2)(jobs.compare)
)
app.command(short_help="Find what would stop or slow a job.")(showing_errors(2)(hosts.doctor))
app.command(
    cls=PlainCommand, short_help="Measure how training scales here.", context_settings=_SCRIPTS_OWN
)(showing_errors(2)(bench.bench))


def _warn_of_misplaced_options(context: typer.Context, script: str, arguments: list[str]) -> None:
    """Warns if an option of kerasdist is given after the script's name, and not before it.

    This is not an error, because a script may have its own option ``--workers``.
    """
    given = {word.partition("=")[0] for word in arguments if word.startswith("-")}
    for own in context.command.params:
        names = given & {name for name in own.opts if name != "-m"}
        source = context.get_parameter_source(str(own.name))
        if names and source is not None and source.name == "DEFAULT":
            name = min(names)
            typer.echo(
                f"[kerasdist] warning: {name} stands after the script's name, so {script} gets it, "
                f"and kerasdist does not. If you meant kerasdist's option, write it before: "
                f"kerasdist run {name} ... {script}",
                err=True,
            )


def _range_of(text: str | None) -> tuple[int | None, int | Literal["gpu"] | None]:
    """Returns the smallest and the largest number of workers in the text of ``--workers``.

    The smallest number is None if the text does not have the form A:B.
    """
    words = (text or "").split(":")
    if len(words) != 2:
        return None, number_of_workers(text)
    if not all(word.isdecimal() for word in words) or not 1 <= int(words[0]) <= int(words[1]):
        raise typer.BadParameter(
            f"expected A:B, two numbers from 1, the second at least the first, received {text!r}",
            param_hint="--workers",
        )
    return int(words[0]), int(words[1])


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
        # If the program that reads the output has ended, such as `head` in `kerasdist info | head`,
        # Python's last flush would change the exit code to 120:
        # https://docs.python.org/3/library/signal.html#note-on-sigpipe
        try:
            sys.stdout.flush()
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
