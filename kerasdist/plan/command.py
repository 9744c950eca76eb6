"""What the command `kerasdist plan` does."""

from __future__ import annotations

import importlib.metadata
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

from kerasdist.core.backend_choice import VARIABLE, is_installed
from kerasdist.core.sharding import Divided, Sharding
from kerasdist.errors import BackendError, InputError
from kerasdist.plan.hardware import Chip, parse_target

# What libraries say about GPUs, TPUs and hosts that they do not find here.
_LOG_LEVELS = ("TF_CPP_MIN_LOG_LEVEL", "TPU_MIN_LOG_LEVEL", "TPU_STDERR_LOG_LEVEL")
_PLUGINS = ("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13")


@final
@dataclass(frozen=True)
class PlanOptions:
    """The options of `kerasdist plan`.

    Attributes:
        script: A file, or ``module:function``.
        arguments: The script's arguments.
        devices: The target's name.
        batch_per_device: Examples of a device; None: the script's batch, divided.
        sharding: ``"optimizer"`` or ``"full"`` in place of the script's own; None: as the script
            has it.
        step_time: The measured time of a step on one device, in milliseconds.
        network_efficiency: The part of the network's rate that collectives reach.
        largest_batch: Whether to look for the largest batch that fits.
        as_json: Whether to print JSON.
        plot: Where to draw the scaling.
    """

    script: str
    arguments: Sequence[str]
    devices: str
    batch_per_device: int | None = None
    sharding: Divided | None = None
    step_time: float | None = None
    network_efficiency: float = 1.0
    largest_batch: bool = True
    as_json: bool = False
    plot: Path | None = None


def run(options: PlanOptions) -> bool:
    """Makes and prints a plan. Returns whether the step fits.

    Raises:
        KerasdistError: If the target is unknown, a package is missing, or the script takes no
            training step.
    """
    target = parse_target(options.devices).with_network(options.network_efficiency)
    _require_compiler(target.chip)
    named = os.environ.get(VARIABLE)
    _prepare_environment()
    # Only now, as these import Keras and JAX, which read the variables.
    from kerasdist.backends.jax import ahead_of_time
    from kerasdist.plan import planning, report, script

    if options.plot is not None:
        report.require_matplotlib()
    if named not in (None, "jax"):
        _say(f"{VARIABLE}={named}, but a plan is always made on JAX, with the same Keras model")
    asked = None if options.sharding is None else Sharding(options.sharding)
    described = ahead_of_time.PlanningBackend(script.devices_of(target), asked)
    _say(f"running {options.script} up to its first training step ...")
    step = script.first_step(options.script, options.arguments, described)
    if asked is not None and step.strategy is None:
        raise InputError(
            "Expected a model made in a strategy's scope, whose replicas divide its state. "
            f"Received: --sharding {asked.state}, for a model made outside of any. Make it in "
            "`with kd.MirroredStrategy().scope():`."
        )
    examples = planning.examples_of(
        ahead_of_time.examples_in(step.batch), target, options.batch_per_device
    )
    subject = planning.Subject(
        script=options.script,
        strategy=step.strategy,
        parameters=step.model.count_params(),
        examples=step.examples,
        sharding=_name_of(script.sharding_of(step.model)),
    )
    plan = planning.make_plan(
        subject,
        examples,
        target,
        script.compiler(step.model, step.batch, _say),
        largest=options.largest_batch,
        measured=None if options.step_time is None else options.step_time / 1e3,
    )
    if options.as_json:
        sys.stdout.write(report.as_json(plan) + "\n")
    else:
        report.show(plan)
    if options.plot is not None and plan.compiled.refused is None:
        report.plot(plan, options.plot)
        _say(f"wrote {options.plot}")
    return plan.fits


def _name_of(sharding: object) -> str | None:
    """Returns a text for a strategy's argument `sharding`."""
    if sharding is None:
        return None
    return sharding.state if isinstance(sharding, Sharding) else type(sharding).__name__


def _say(text: str) -> None:
    sys.stderr.write(f"[kerasdist] {text}\n")


def _prepare_environment() -> None:
    """Sets the variables of Keras, JAX and XLA, which read them when they are imported."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0"  # it would need a GPU
    os.environ.update(
        {
            VARIABLE: "jax",
            "JAX_PLATFORMS": "cpu",  # on which the model is made; compiled is for what is described
            "TPU_SKIP_MDS_QUERY": "1",
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # no TPU is opened, so several may compile at once
            "XLA_FLAGS": flags.strip(),
            "KERASDIST_CLUSTER": "none",
        }
    )
    for name in _LOG_LEVELS:
        os.environ.setdefault(name, "3")


def _require_compiler(chip: Chip) -> None:
    """Refuses a target whose compiler is not installed."""
    if not is_installed("jax"):
        raise BackendError(
            "Expected JAX to be installed, on which plans are made. Received: no package jax. "
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
            f"Expected XLA's compiler for {chip.title} to be installed; it needs no such device. "
            f"Received: devices of {chip.name}, without the package. Install it: pip install "
            f"--no-deps {packages}, or pip install 'kerasdist[plan]'."
        )
