"""Compiles the training step of a model for targets, on JAX."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from kerasdist.backends.jax import ahead_of_time
from kerasdist.backends.jax.ahead_of_time import Compiled, TrainingProgram
from kerasdist.backends.jax.mesh.layout import Layout
from kerasdist.errors import UnsupportedError
from kerasdist.plan.hardware import target_config
from kerasdist.plan.hlo import Collective, collectives, device_work
from kerasdist.plan.planning import Compilation, Compile
from kerasdist.plan.prediction import Work
from kerasdist.plan.targets import Target
from kerasdist.training.binding import binding_of

_NEEDED = re.compile(r"Used ([\d.]+)([KMGT]?) of")


def devices_of(target: Target) -> list[Any]:
    """Returns a target's devices, as XLA's compiler describes them."""
    chip = target.chip
    return ahead_of_time.described_devices(chip.platform, target.topology, target_config(chip))


def sharding_of(model: Any) -> Any:
    """Returns the argument `sharding` of the strategy that a model was made under."""
    layout = _layout_of(model)
    return None if layout is None else layout.sharding


def _layout_of(model: Any) -> Any:
    """Returns the layout of the strategy that a model was made under."""
    binding = binding_of(model)
    return None if binding is None else binding.replicas.logical_devices


def compiler(model: Any, batch: Any, report: Callable[[str], None]) -> Compile:
    """Returns a function that compiles a model's training step, with batches like this one.

    Args:
        model: A compiled and built model.
        batch: A batch of any size.
        report: Is told what happens.
    """
    binding = binding_of(model)
    of_script, sharding = _layout_of(model), sharding_of(model)
    logical = 1 if of_script is None else of_script.splits.logical_devices

    def compile_step(target: Target, examples: int) -> Compilation:
        if target.devices % logical:
            raise UnsupportedError(
                f"Expected a number of devices that replicas of {logical} divide. Received: "
                f"devices={target.devices} ({target}). Choose another target."
            )
        report(f"compiling for {target}, {examples} examples a device ...")
        layout = Layout(devices_of(target), logical, sharding)
        layout.split_variables({} if of_script is None else of_script.splits.rules)
        if binding is not None:
            binding.replicas.logical_devices = layout
        shapes = ahead_of_time.resized(batch, examples * target.devices)
        program = ahead_of_time.training_program(model, shapes, layout)
        return _facts(program, ahead_of_time.compiled(program), target, examples)

    return compile_step


def _facts(
    program: TrainingProgram, compiled: Compiled, target: Target, examples: int
) -> Compilation:
    # `fit` places a batch on accelerators while the step before it runs, so that there are two.
    memory = {
        "parameters": program.state_bytes["trainable"] + program.state_bytes["non_trainable"],
        "optimizer": program.state_bytes["optimizer"],
        "metrics": program.state_bytes["metrics"],
        "input": 2 * program.input_bytes,
        "activations and temporaries": compiled.temporary_bytes,
        "outputs": compiled.output_bytes,
        "program": compiled.code_bytes,
    }
    flops = {kind: count / target.devices for kind, count in program.matmul_flops.items()}
    found = [_named(each, program, target) for each in collectives(compiled.text)]
    done = device_work(compiled.text)
    needed = _NEEDED.search(compiled.refused or "")
    return Compilation(
        batch=examples,
        memory=memory,
        work=Work(flops, done.memory_bytes, done.cycles),
        collectives=found,
        refused=compiled.refused,
        refused_bytes=_bytes(needed[1], needed[2]) if needed else 0.0,
    )


def _named(each: Collective, program: TrainingProgram, target: Target) -> Collective:
    """Returns a collective with its number of devices: those of a replica, or all."""
    logical = program.logical_devices
    within = logical if 1 < logical < target.devices and each.devices == logical else 0
    return Collective(each.kind, each.bytes, within, each.overlap)


def _bytes(number: str, unit: str) -> float:
    """Returns the bytes of a size that XLA writes as a number and a unit, such as 15.75 and G."""
    return float(number) * 1024.0 ** " KMGT".index(unit or " ")
