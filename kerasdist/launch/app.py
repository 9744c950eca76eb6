"""The command ``kerasdist``."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from kerasdist.errors import KerasdistError
from kerasdist.launch import info as information
from kerasdist.launch.job import run_job
from kerasdist.launch.spec import STOP_SECONDS, JobSpec, python_command

app = typer.Typer(
    name="kerasdist",
    help="Distributed training for Keras 3: start a job, or see what a job would find.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


# The script's own options are not ours: everything after its name is passed on.
@app.command(context_settings={"allow_interspersed_args": False, "ignore_unknown_options": False})
def run(
    script: Annotated[str, typer.Argument(help="A script, or with -m a module.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(help="What the script gets.", show_default=False)
    ] = None,
    *,
    workers: Annotated[
        int | None,
        typer.Option(
            "--workers", "-n", min=1, help="How many; by default, the hosts' slots, or 1."
        ),
    ] = None,
    devices_per_worker: Annotated[
        int | None, typer.Option(min=1, help="How many CPU devices each worker prepares.")
    ] = None,
    max_restarts: Annotated[
        int, typer.Option(min=0, help="How often the whole job is started again after a failure.")
    ] = 0,
    hosts: Annotated[
        str | None,
        typer.Option(help="Machines reached by ssh: h1,h2, or h1:4,h2:4, or gpu[01-16]:8."),
    ] = None,
    logs: Annotated[
        Path | None,
        typer.Option(help="A folder for a file an attempt and worker; by default, the screen."),
    ] = None,
    timeout_on_stop: Annotated[
        float, typer.Option(min=0.0, help="Seconds that workers have from SIGTERM to SIGKILL.")
    ] = STOP_SECONDS,
    env: Annotated[
        list[str] | None,
        typer.Option(help="NAME=VALUE for all workers. May be given again.", show_default=False),
    ] = None,
    python: Annotated[
        str | None, typer.Option(help="The workers' interpreter; by default, this one.")
    ] = None,
    module: Annotated[bool, typer.Option("-m", help="SCRIPT is a module.")] = False,
) -> None:
    """Start a script as several workers, and end them all when one fails."""
    spec = JobSpec(
        command=python_command(script, arguments or (), module=module, python=python),
        workers=workers,
        devices_per_worker=devices_per_worker,
        max_restarts=max_restarts,
        hosts=() if hosts is None else (hosts,),
        logs=logs,
        stop_seconds=timeout_on_stop,
        environment=dict(_variable(each) for each in env or ()),
    )
    try:
        raise typer.Exit(run_job(spec).exit_code)
    except (KerasdistError, OSError) as error:
        typer.echo(f"kerasdist: {error}", err=True)
        raise typer.Exit(1) from error


@app.command()
def info(
    *,
    json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Show which cluster is detected here, and why; and what is installed."""
    facts = information.gather()
    if json:
        typer.echo(information.as_json(facts))
    else:
        information.show(facts)
    raise typer.Exit(0 if facts.error is None else 1)


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise typer.BadParameter(f"expected NAME=VALUE, received {text!r}", param_hint="--env")
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
