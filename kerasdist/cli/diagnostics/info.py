"""``kerasdist info`` shows what a script would find here: the cluster, devices and versions.

This file imports neither Keras nor a framework.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import final

import typer
from rich.console import Console
from rich.table import Table

import kerasdist
from kerasdist.cli.formatting import plain_console, table
from kerasdist.cli.options import AsJson
from kerasdist.cluster import detection, kerasdist_variables
from kerasdist.cluster.detection import Answer
from kerasdist.cluster.source import Absent, Membership, Source
from kerasdist.config import CPU_DEVICES_VARIABLE
from kerasdist.core import gpus
from kerasdist.core.backend_choice import backend_choice, version_of
from kerasdist.errors import KerasdistError

_PACKAGES = (
    *("keras", "keras-nightly", "tensorflow", "tensorflow-cpu", "tf-nightly"),
    *("jax", "jaxlib", "torch", "numpy"),
)
_DEVICE_VARIABLES = (
    CPU_DEVICES_VARIABLE,
    *(gpus.CUDA, gpus.ORDER, gpus.HIP, gpus.ROCR),
    *("TPU_VISIBLE_CHIPS", "JAX_PLATFORMS", "KERAS_TORCH_DEVICE", "XLA_FLAGS"),
)


@final
@dataclass(frozen=True)
class SourceFacts:
    """What one source, such as torchrun or Slurm, says about the cluster.

    Attributes:
        name: The name of the source.
        verdict: ``"believed"`` for the source whose answer is used; ``"agrees"`` for a source that
            gives the same rank and number of workers; ``"contradicts"`` if the sources contradict
            each other; ``"wrong"`` if the variables have an error; ``"absent"`` if the source
            describes no cluster; or ``"outer"`` if the source describes the task or pod in which a
            launcher has started this process.
        reason: Why the source has this verdict.
        variables: The environment variables of the source that are set.
    """

    name: str
    verdict: str
    reason: str
    variables: Mapping[str, str]


@final
@dataclass(frozen=True)
class GpuFacts:
    """A GPU that this process sees.

    Attributes:
        name: The name of the GPU in kerasdist, such as ``gpu:0``.
        model: The maker's name for the GPU.
        memory: The bytes of its memory; None if the driver does not report them.
        uuid: An id that no other GPU has.
        local_worker: The number of the local worker that takes this GPU; None if no worker does.
    """

    name: str
    model: str
    memory: int | None
    uuid: str
    local_worker: int | None


@final
@dataclass(frozen=True)
class Facts:
    """Everything that a script would find in this environment.

    Attributes:
        membership: This process's place in its job; None if it is the only process of its job.
        error: What is wrong with the environment; None if nothing is wrong.
        independent: Whether ``KERASDIST_CLUSTER=none`` makes this process a job of its own,
            whatever the sources say.
        sources: What each source says, in the order in which the sources are asked.
        backend: The backend that Keras will choose.
        backend_reason: Where the choice of the backend comes from.
        backend_problem: Why the backend cannot be used here; None if it can be used.
        devices: The environment variables that choose devices and are set, with their values.
        gpus: The GPUs that this process sees.
        gpu_problem: Why NVIDIA's driver does not work; None if it works or is not installed.
        strategy: The strategy that `kerasdist.auto` would return.
        versions: The versions of the packages, by name; None for a package that is not installed.
    """

    membership: Membership | None
    error: str | None
    independent: bool
    sources: tuple[SourceFacts, ...]
    backend: str
    backend_reason: str
    backend_problem: str | None
    devices: Mapping[str, str]
    gpus: tuple[GpuFacts, ...]
    gpu_problem: str | None
    strategy: str
    versions: Mapping[str, str | None]


def info(*, as_json: AsJson = False) -> None:
    """Show which cluster is detected here, and why; and what is installed."""
    facts = gather()
    if as_json:
        typer.echo(json.dumps(asdict(facts), indent=2))
    else:
        show(facts, plain_console())
    raise typer.Exit(0 if facts.error is None and facts.backend_problem is None else 1)


def gather(environ: Mapping[str, str] = os.environ) -> Facts:
    """Collects what a script would find in these environment variables and on this machine."""
    found = detection.findings(environ)
    error, believed, resolver = None, None, None
    try:
        believed = detection.choose(found)
        resolver = detection.detect(environ)
    except KerasdistError as wrong:
        error = str(wrong)
    place = None if believed is None else found[believed]
    membership = None if resolver is None else resolver.membership()
    seen = _gpus(environ, membership)
    backend = backend_choice(environ)
    return Facts(
        membership=membership,
        error=error,
        independent=error is None and kerasdist_variables.is_independent(environ),
        sources=tuple(_source(*each, place, environ) for each in found.items()),
        backend=backend.name,
        backend_reason=backend.reason,
        backend_problem=backend.problem,
        devices={name: environ[name] for name in _DEVICE_VARIABLES if environ.get(name)},
        gpus=seen,
        gpu_problem=gpus.driver_problem(),
        strategy=_strategy(environ, membership, seen, backend.name),
        versions={
            "kerasdist": kerasdist.__version__,
            **{each: version_of(each) for each in _PACKAGES},
        },
    )


def show(facts: Facts, console: Console) -> None:
    """Prints the facts for human readers."""
    console.print(_headline(facts), style="bold" if facts.error is None else "bold red")
    headings = ("source", "verdict", "why", "variables")
    asked = table("Sources, in the order in which they are asked", headings, left=4)
    for source in facts.sources:
        variables = "\n".join(f"{name}={value}" for name, value in source.variables.items())
        style = "dim" if source.verdict == "absent" else None
        asked.add_row(source.name, source.verdict, source.reason, variables, style=style)
    console.print(asked)
    console.print(f"Backend: {facts.backend} ({facts.backend_reason})")
    if facts.backend_problem is not None:
        console.print(facts.backend_problem, style="bold red")
    chosen = ", ".join(f"{name}={value}" for name, value in facts.devices.items())
    console.print(f"Devices: {chosen or 'no variable chooses them'}")
    if facts.gpu_problem is not None:
        text = f"NVIDIA's driver does not work: {facts.gpu_problem}"
        console.print(text, style="bold red")
    if facts.gpus:
        console.print(_table_of_gpus(facts))
    console.print(f"A strategy would use: {facts.strategy}")
    installed = [f"{name} {version}" for name, version in facts.versions.items() if version]
    console.print(f"Versions: {', '.join(installed)}")


def _table_of_gpus(facts: Facts) -> Table:
    headings = ("device", "model", "memory", "UUID", "worker of this machine that takes it")
    shown = table("GPUs that this process sees", headings, left=5)
    for gpu in facts.gpus:
        memory = "unknown" if gpu.memory is None else f"{gpu.memory / 2**30:.0f} GiB"
        owner = "idle" if gpu.local_worker is None else str(gpu.local_worker)
        shown.add_row(gpu.name, gpu.model, memory, gpu.uuid, owner)
    return shown


def _gpus(environ: Mapping[str, str], place: Membership | None) -> tuple[GpuFacts, ...]:
    seen = gpus.visible(environ)
    number, workers = 0, 1
    if place is not None and place.local_workers is not None and place.local_rank is not None:
        number, workers = place.local_rank, place.local_workers
    if len(seen) < workers or kerasdist_variables.RANK in environ:
        # A scheduler or `kerasdist run` has hidden the GPUs of other workers from this worker. So
        # this worker takes all GPUs that it sees.
        owners = dict.fromkeys(range(len(seen)), number)
    else:
        parts = [gpus.part(len(seen), workers, each) for each in range(workers)]
        owners = {index: each for each, own in enumerate(parts) for index in own}
    return tuple(
        GpuFacts(f"gpu:{index}", gpu.name, gpu.memory, gpu.uuid, owners.get(index))
        for index, gpu in enumerate(seen)
    )


def _strategy(
    environ: Mapping[str, str], place: Membership | None, seen: Sequence[GpuFacts], backend: str
) -> str:
    number = 0 if place is None or place.local_rank is None else place.local_rank
    own = [gpu.name for gpu in seen if gpu.local_worker == number]
    cpus = environ.get(CPU_DEVICES_VARIABLE, "")
    if cpus.isdecimal():
        own = [f"cpu:{index}" for index in range(int(cpus))]
        devices = f"{', '.join(own)}, as {CPU_DEVICES_VARIABLE} says"
    elif own:
        devices = f"{', '.join(own)}, if {backend} is built for GPUs"
    else:
        devices = f"no GPU; TPUs or another accelerator, if {backend} finds one, else the CPU"
    if place is not None and place.num_workers > 1:
        return f"MultiWorkerMirroredStrategy, here on {devices}"
    return f"{'MirroredStrategy' if len(own) > 1 else 'OneDeviceStrategy'} on {devices}"


def _headline(facts: Facts) -> str:
    place = facts.membership
    if facts.error is not None:
        return facts.error
    if facts.independent:
        return (
            f"No cluster: {kerasdist_variables.CLUSTER}=none makes each process a job of its own."
        )
    if place is None:
        return "No cluster: a script that is started here is a job of its own."
    local = "" if place.local_rank is None else f", number {place.local_rank} on this machine"
    return (
        f"Worker {place.rank} of {place.num_workers}{local}, told by {place.source}; rank 0 is at "
        f"{place.coordinator}."
    )


def _source(
    source: Source, answer: Answer, believed: object, environ: Mapping[str, str]
) -> SourceFacts:
    variables = {name: environ[name] for name in source.variables if environ.get(name)}
    if isinstance(answer, Absent):
        return SourceFacts(source.name, "absent", answer.reason, variables)
    if isinstance(answer, KerasdistError):
        return SourceFacts(source.name, "wrong", str(answer), variables)
    place, verdict = (answer.rank, answer.num_workers), "contradicts"
    if answer is believed:
        verdict = "believed"
    elif isinstance(believed, Membership):  # otherwise the sources contradict each other
        verdict = "agrees" if place == (believed.rank, believed.num_workers) else "outer"
    return SourceFacts(source.name, verdict, "rank {} of {}".format(*place), variables)
