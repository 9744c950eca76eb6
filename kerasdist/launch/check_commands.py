"""The commands that check a machine or a cluster: ``kerasdist test``, ``doctor`` and ``bench``."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from pathlib import Path
from typing import Annotated, Literal

import typer

from kerasdist.errors import KerasdistError
from kerasdist.launch.help_text import PlainCommand

Arguments = Annotated[
    list[str] | None,
    typer.Argument(metavar="ARGUMENTS", help="Passed to the script.", show_default=False),
]
Backends = Annotated[
    list[str] | None,
    typer.Option(
        "--backend",
        metavar="NAME",
        help="tensorflow, jax or torch; may be given several times (default: all installed).",
        show_default=False,
    ),
]
Workers = Annotated[
    str | None,
    typer.Option(
        "--workers",
        "-n",
        metavar="N|gpu",
        help="Number of workers (default: as kerasdist run; 2 on a machine without accelerators).",
    ),
]
Devices = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help="Number of CPU devices that each worker prepares."),
]
Hosts = Annotated[
    str | None,
    typer.Option(metavar="HOSTS", help="Machines reached by ssh, as in kerasdist run: h1:4,h2:4."),
]
Seconds = Annotated[
    float, typer.Option(min=1.0, metavar="SECONDS", help="After how long a job is ended.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print machine-readable JSON.")]


def compare(
    *,
    backend: Backends = None,
    workers: Workers = None,
    hosts: Hosts = None,
    devices_per_worker: Devices = None,
    timeout: Seconds = 300.0,
    json: AsJson = False,
) -> None:
    """Train for some seconds here, and compare the weights with one device.

    For each backend a job of this machine, or of --hosts, sums, gathers and broadcasts, measures
    the bandwidth, and trains 20 steps. The exit code is 1 if something is wrong.
    """
    with _errors():
        from kerasdist.checks import cluster_test, jobs

        place = jobs.Place(number_of(workers), _listed(hosts), devices_per_worker, timeout)
        raise typer.Exit(0 if cluster_test.run(backend or (), place, as_json=json) else 1)


def doctor(
    *,
    hosts: Hosts = None,
    json: AsJson = False,
) -> None:
    """Look for what would stop or slow a job on this machine, or on --hosts and between them.

    Versions, devices, links, clocks, ports, names, disks, shared memory and limits, and what each
    means for a job. The exit code is 1 if there is a problem, 0 with warnings.
    """
    with _errors():
        from kerasdist.checks import doctor

        raise typer.Exit(0 if doctor.run(_listed(hosts), as_json=json) else 1)


# Everything after the script's name is passed on to the script, as with `run`.
def bench(
    script: Annotated[
        str | None,
        typer.Argument(metavar="SCRIPT", help="A script (default: a model of kerasdist's own)."),
    ] = None,
    arguments: Arguments = None,
    *,
    backend: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="tensorflow, jax or torch (default: Keras's choice)."),
    ] = None,
    workers: Annotated[
        str | None,
        typer.Option(
            "--workers",
            "-n",
            metavar="N,N,...",
            help="Numbers of workers (default: 1, 2, 4, ... up to the GPUs, slots or cores).",
        ),
    ] = None,
    hosts: Hosts = None,
    batch_per_replica: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Of the model of kerasdist's own (default: 256)."),
    ] = None,
    steps: Annotated[
        int, typer.Option(min=2, metavar="N", help="Steps an epoch of kerasdist's own model.")
    ] = 20,
    timeout: Seconds = 900.0,
    json: AsJson = False,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the scaling, with matplotlib.")
    ] = None,
) -> None:
    """Measure how training scales on this machine, or on --hosts.

    The script, or a model of kerasdist's own, is trained by 1, 2, ... workers; its throughput, and
    the bandwidth between the replicas beside what the links allow, are shown. A script is run as it
    is, and the longest of its fits counts.
    """
    with _errors():
        from kerasdist.checks import bench as scaling

        options = scaling.BenchOptions(
            script=script,
            arguments=arguments or (),
            backend=backend,
            workers=_numbers(workers),
            hosts=_listed(hosts),
            batch_per_replica=batch_per_replica,
            steps=steps,
            seconds=timeout,
            as_json=json,
            plot=plot,
        )
        raise typer.Exit(0 if scaling.run(options) else 1)


def register(app: typer.Typer) -> None:
    """Adds the commands to the command line."""
    app.command("test", short_help="Compare a short training with one device.")(compare)
    app.command(short_help="Find what would stop or slow a job.")(doctor)
    app.command(
        cls=PlainCommand,
        short_help="Measure how training scales here.",
        context_settings={"allow_interspersed_args": False, "ignore_unknown_options": False},
    )(bench)


@contextlib.contextmanager
def _errors() -> Generator[None]:
    """Shows an error of kerasdist's as a line, with exit code 2."""
    try:
        yield
    except (KerasdistError, OSError) as error:
        typer.echo(f"kerasdist: {error}", err=True)
        raise typer.Exit(2) from error


def _listed(hosts: str | None) -> tuple[str, ...]:
    return () if hosts is None else (hosts,)


def number_of(text: str | None) -> int | Literal["gpu"] | None:
    """Reads the option ``--workers``."""
    if text is None or text == "gpu":
        return text
    if not text.isdecimal() or int(text) < 1:
        raise typer.BadParameter(
            f"expected a number from 1, or gpu, received {text!r}", param_hint="--workers"
        )
    return int(text)


def _numbers(text: str | None) -> tuple[int, ...]:
    if text is None:
        return ()
    words = text.split(",")
    if not all(word.isdecimal() and int(word) for word in words):
        raise typer.BadParameter(
            f"expected numbers from 1, such as 1,2,4, received {text!r}", param_hint="--workers"
        )
    return tuple(sorted({int(word) for word in words}))
