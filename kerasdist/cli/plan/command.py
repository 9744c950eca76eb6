"""The command `kerasdist plan`."""

from __future__ import annotations

import gc
import importlib.metadata
import os
from typing import Annotated

import typer

from kerasdist.cli.options import AsJson, Plot, option
from kerasdist.cli.plan.groups import weight_groups
from kerasdist.core.backend_choice import VARIABLE, is_installed
from kerasdist.core.hardware import Chip, parse_target
from kerasdist.core.sharding import Divided, Offload, Sharding
from kerasdist.errors import BackendError, InputError

# These variables make libraries silent about GPUs, TPUs and hosts that this machine lacks.
_LOG_LEVELS = ("TF_CPP_MIN_LOG_LEVEL", "TPU_MIN_LOG_LEVEL", "TPU_STDERR_LOG_LEVEL")
# No autotuning, because it needs a GPU. Few optimizations by LLVM, because no kernel ever runs.
_XLA_FLAGS = (
    "--xla_gpu_autotune_level=0 --xla_backend_optimization_level=0 "
    "--xla_llvm_disable_expensive_passes=true"
)
_PLUGINS = ("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13")


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
    devices: Annotated[str, option("TARGET", "8xh100, 2x8xh100, v5e:4x4, v5p:16x16x16, ...")],
    batch_per_device: Annotated[
        int | None,
        option("N", "Examples on each device (default: the batch / the devices).", min=1),
    ] = None,
    sharding: Annotated[
        Divided | None,
        option(
            "optimizer|full|auto",
            "What the replicas shard (default: what the script's strategy says).",
        ),
    ] = None,
    offload: Annotated[
        Offload | None,
        option("optimizer", "What the host's memory holds (default: as the script's strategy)."),
    ] = None,
    step_time: Annotated[
        float | None,
        option(
            "MILLISECONDS",
            "The measured time of a step on one device (default: a time predicted for the chip).",
            min=0.0,
        ),
    ] = None,
    network_efficiency: Annotated[
        float,
        option("PART", "The fraction of the known rate of the network that is reached.", min=0.01),
    ] = 1.0,
    largest_batch: Annotated[
        bool, option(None, "Whether to look for the largest batch that fits.")
    ] = True,
    as_json: AsJson = False,
    plot: Plot = None,
) -> None:
    """Show how much memory and time training takes on accelerators that this machine lacks.

    The script runs up to its first training step, on JAX, whichever backend it names. XLA compiles
    that step for the accelerators.
    """
    target = parse_target(devices).with_network(network_efficiency)
    _require_compiler(target.chip)
    named = os.environ.get(VARIABLE)
    _prepare_environment()
    # Garbage collection would take an eighth of the time and find little garbage, because traced
    # and compiled objects are needed to the end.
    gc.disable()
    # Imported only now: Keras and JAX read the variables that `_prepare_environment` has set.
    from kerasdist.backends.jax import ahead_of_time
    from kerasdist.cli import formatting
    from kerasdist.cli.plan import planning, report
    from kerasdist.cli.plan import script as scripts

    if plot is not None:
        formatting.require_matplotlib()
    if named not in (None, "jax"):
        _say(f"{VARIABLE}={named}, but a plan is always made on JAX, with the same Keras model")
    asked = None if sharding is None else Sharding(sharding)
    described = ahead_of_time.described_devices(target)
    _say(f"running {script} up to its first training step ...")
    backend = ahead_of_time.PlanningBackend(described, asked, offload)
    step = scripts.first_step(script, arguments or (), backend)
    given = f"--sharding {sharding}" if sharding else f"--offload {offload}" if offload else ""
    if given and step.strategy is None:
        raise InputError(
            "Expected a model made in the scope of a strategy, which divides state or leaves "
            f"it on the host. Received: {given}, for a model made outside of any scope. "
            "Make the model in `with kd.MirroredStrategy().scope():`."
        )
    examples = planning.examples_of(ahead_of_time.examples_in(step.batch), target, batch_per_device)
    of_script = scripts.sharding_of(step.model)
    subject = planning.Subject(
        script=script,
        strategy=step.strategy,
        parameters=step.model.count_params(),
        examples=step.examples,
        sharding=_name_of(of_script),
        groups=weight_groups(step.model, of_script, target),
        layout=scripts.described(step),
    )
    made = planning.make_plan(
        subject,
        examples,
        target,
        scripts.compiler(step.model, step.batch, _say),
        largest=largest_batch,
        measured=None if step_time is None else step_time / 1e3,
    )
    if as_json:
        typer.echo(report.as_json(made))
    else:
        report.show(made, formatting.plain_console())
    if plot is not None and made.compiled.refused is None:
        report.plot(made, plot)
        _say(f"wrote {plot}")
    raise typer.Exit(not made.fits)


def _name_of(sharding: object) -> str | None:
    """Returns the name of a value of `sharding`, such as ``"full"`` or ``"LayoutMap"``."""
    if sharding is None:
        return None
    return sharding.state if isinstance(sharding, Sharding) else type(sharding).__name__


def _say(text: str) -> None:
    typer.echo(f"[kerasdist] {text}", err=True)


def _prepare_environment() -> None:
    """Sets variables that Keras, JAX and XLA read when they are imported."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} {_XLA_FLAGS}"
    os.environ.update(
        {
            VARIABLE: "jax",
            # the model is made on the CPU; compilation is for the described devices
            "JAX_PLATFORMS": "cpu",
            "TPU_SKIP_MDS_QUERY": "1",
            # several processes may load libtpu at once, because none of them opens a TPU
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
            "XLA_FLAGS": flags.strip(),
            "KERASDIST_CLUSTER": "none",
        }
    )
    for name in _LOG_LEVELS:
        os.environ.setdefault(name, "3")


def _require_compiler(chip: Chip) -> None:
    """Raises an error if JAX, or XLA's compiler for this chip, is not installed."""
    if not is_installed("jax"):
        raise BackendError(
            "Expected JAX to be installed, on which all plans are made. Received: no package jax. "
            "Install it: pip install 'kerasdist[plan]'."
        )
    if chip.platform == "tpu":
        found, packages = is_installed("libtpu"), "libtpu"
    else:
        version = importlib.metadata.version("jaxlib")
        found = any(map(is_installed, _PLUGINS))
        packages = f"jax-cuda12-plugin=={version} jax-cuda12-pjrt=={version}"
    if not found:
        raise BackendError(
            f"Expected XLA's compiler for {chip.title} to be installed; the compiler needs no such "
            f"device. Received: devices of {chip.name}, without the compiler's package. Install "
            f"it: pip install --no-deps {packages}, or pip install 'kerasdist[plan]'."
        )
