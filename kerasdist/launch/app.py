"""The command ``kerasdist``."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer

from kerasdist._version import __version__
from kerasdist.core.backend_choice import backend_choice
from kerasdist.errors import BackendError, KerasdistError
from kerasdist.job import profiling
from kerasdist.launch import check_commands, dry_run
from kerasdist.launch import info as information
from kerasdist.launch import live as live_view
from kerasdist.launch.help_text import PlainCommand
from kerasdist.launch.job import run_job
from kerasdist.launch.spec import STOP_SECONDS, JobSpec, python_command


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
        bool, typer.Option("--version", is_eager=True, callback=_version, help="Show the version.")
    ] = False,
) -> None:
    """Distributed training for Keras 3: start, plan, check and measure jobs."""
    del version


# Everything after the script's name is passed on to the script.
@app.command(
    cls=PlainCommand,
    short_help="Start a script as several workers.",
    context_settings={"allow_interspersed_args": False, "ignore_unknown_options": False},
)
def run(
    context: typer.Context,
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="A script, or with -m a module.")],
    arguments: check_commands.Arguments = None,
    *,
    workers: Annotated[
        str | None,
        typer.Option(
            "--workers",
            "-n",
            metavar="N|gpu",
            help="Number of workers; gpu: one per GPU of this machine (default: all slots of "
            "--hosts; without hosts gpu on PyTorch, if there are GPUs, and 1 elsewhere).",
        ),
    ] = None,
    devices_per_worker: check_commands.Devices = None,
    max_restarts: Annotated[
        int,
        typer.Option(
            min=0, metavar="N", help="Restart the whole job at most N times after a failure."
        ),
    ] = 0,
    hosts: Annotated[
        str | None,
        typer.Option(
            metavar="HOSTS", help="Machines reached by ssh: h1,h2, or h1:4,h2:4, or gpu[01-16]:8."
        ),
    ] = None,
    logs: Annotated[
        Path | None,
        typer.Option(
            "--log-dir",
            "--logs",
            metavar="FOLDER",
            help="Write one log file per attempt and worker here, and the state of all workers to "
            "status.json (default: the terminal).",
        ),
    ] = None,
    live: Annotated[
        Literal["auto", "on", "off"],
        typer.Option(
            metavar="auto|on|off",
            help="A table of all workers, kept up to date; auto: on a terminal.",
        ),
    ] = "auto",
    profile: Annotated[
        str | None,
        typer.Option(
            metavar="FIRST:LAST",
            help="Profile these steps of fit on every worker, for example 10:20.",
        ),
    ] = None,
    profile_dir: Annotated[
        Path, typer.Option(metavar="FOLDER", help="The folder of the profile, trace.json.gz.")
    ] = Path("profile"),
    timeout_on_stop: Annotated[
        float,
        typer.Option(min=0.0, metavar="SECONDS", help="Time from SIGTERM to SIGKILL."),
    ] = STOP_SECONDS,
    env: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[=VALUE]",
            help="A variable for all workers; without =VALUE, with the value that it has here, "
            "which then stands in no process list. May be given several times.",
            show_default=False,
        ),
    ] = None,
    python: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="The workers' interpreter (default: this one)."),
    ] = None,
    module: Annotated[bool, typer.Option("-m", help="SCRIPT is a module.")] = False,
    only_show: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Start nothing; print each worker's host, variables and command."
        ),
    ] = False,
) -> None:
    """Start a script as several workers, and end them all when one fails.

    Options of kerasdist come before the script: kerasdist run --workers 2 train.py.
    """
    _warn_of_misplaced_options(context, script, arguments or ())
    spec = JobSpec(
        command=python_command(script, arguments or (), module=module, python=python),
        workers=check_commands.number_of(workers),
        devices_per_worker=devices_per_worker,
        max_restarts=max_restarts,
        hosts=() if hosts is None else (hosts,),
        logs=logs,
        live=live == "on" or (live == "auto" and live_view.is_possible()),
        profile=None if profile is None else _profiled(profile, profile_dir),
        stop_seconds=timeout_on_stop,
        environment=dict(_variable(each) for each in env or ()),
    )
    try:
        _check_backend(spec)
        if only_show:
            typer.echo(dry_run.described(spec))
            return
        raise typer.Exit(run_job(spec).exit_code)
    except (KerasdistError, OSError) as error:
        typer.echo(f"kerasdist: {error}", err=True)
        raise typer.Exit(1) from error


@app.command(short_help="Show the cluster that is detected, and what is installed.")
def info(
    *,
    json: check_commands.AsJson = False,
) -> None:
    """Show which cluster is detected here, and why; and what is installed."""
    facts = information.gather()
    if json:
        typer.echo(information.as_json(facts))
    else:
        information.show(facts)
    raise typer.Exit(0 if facts.error is None and facts.backend_problem is None else 1)


@app.command(cls=PlainCommand, short_help="Predict memory and time on accelerators.")
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
    devices: Annotated[
        str,
        typer.Option(metavar="TARGET", help="8xh100, 2x8xh100, v5e:4x4, v5p:16x16x16, ..."),
    ],
    batch_per_device: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Examples on a device (default: the script's batch, divided)."
        ),
    ] = None,
    sharding: Annotated[
        Literal["optimizer", "full"] | None,
        typer.Option(
            metavar="optimizer|full",
            help="What replicas divide among them (default: as the script's strategy has it).",
        ),
    ] = None,
    step_time: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            metavar="MILLISECONDS",
            help="A step on one device, measured (default: what the chip allows).",
        ),
    ] = None,
    largest_batch: Annotated[
        bool, typer.Option(help="Whether to look for the largest batch that fits.")
    ] = True,
    json: check_commands.AsJson = False,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the scaling, with matplotlib.")
    ] = None,
) -> None:
    """Show what training needs and takes on accelerators that are not here.

    The script runs up to its first training step, on JAX, whichever backend it names. XLA compiles
    that step for the accelerators.
    """
    from kerasdist.plan.command import PlanOptions
    from kerasdist.plan.command import run as make_plan

    options = PlanOptions(
        script=script,
        arguments=arguments or (),
        devices=devices,
        batch_per_device=batch_per_device,
        sharding=sharding,
        step_time=step_time,
        largest_batch=largest_batch,
        as_json=json,
        plot=plot,
    )
    try:
        raise typer.Exit(0 if make_plan(options) else 1)
    except (KerasdistError, OSError) as error:
        typer.echo(f"kerasdist: {error}", err=True)
        raise typer.Exit(2) from error


check_commands.register(app)


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


def _check_backend(spec: JobSpec) -> None:
    """Refuses a backend that does not exist; a missing one may be installed elsewhere."""
    choice = backend_choice({**os.environ, **spec.environment})
    if not choice.is_keras_backend:
        raise BackendError(choice.problem)


def _profiled(text: str, folder: Path) -> profiling.ProfiledSteps:
    try:
        return profiling.parsed(text, folder)
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
