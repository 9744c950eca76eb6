"""Runs a script up to its first training step, and compiles that step for targets, on JAX."""

from __future__ import annotations

import inspect
import math
import pkgutil
import re
import runpy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

import keras

from kerasdist.api.layouts import ModelLayout
from kerasdist.backends import registry
from kerasdist.backends.base.interface import Backend
from kerasdist.backends.base.model_trainer import trainer_of
from kerasdist.backends.jax import ahead_of_time
from kerasdist.backends.jax.ahead_of_time import TrainingProgram
from kerasdist.backends.jax.mesh.layout import Layout
from kerasdist.cli.plan import shapes
from kerasdist.cli.plan.hlo import Collective, collectives, device_work
from kerasdist.cli.plan.planning import Compilation, Compile, Work
from kerasdist.core import ownership
from kerasdist.core.hardware import Target
from kerasdist.errors import InputError, UnsupportedError
from kerasdist.keras_compat.internals import GET_JAX_STATE

_METHODS = ("fit", "train_on_batch")


@final
@dataclass(frozen=True)
class FirstStep:
    """The model, the batch and the strategy of a script's first training step.

    Attributes:
        model: The compiled and built model.
        batch: The global batch.
        strategy: The name of the strategy that the model was made under; None if there was none.
        variables: All existing variables of that strategy, including those of other models.
        examples: How many examples `fit` would have trained on; None if `fit` did not get arrays,
            or the script called `train_on_batch`.
    """

    model: Any
    batch: Any
    strategy: str | None
    variables: Sequence[keras.Variable] = ()
    examples: int | None = None


@final
class _Reached(BaseException):
    """Ends the script at its first training step. An `except Exception` does not catch it."""

    def __init__(self, step: FirstStep) -> None:
        super().__init__()
        self.step = step


def first_step(script: str, arguments: Sequence[str], backend: Backend) -> FirstStep:
    """Runs a script, or calls a function, until its first training step.

    The output of the script goes to standard error.

    Args:
        script: A file, or ``module:function``. The function must return a compiled model and a
            global batch in the form for `train_on_batch`.
        arguments: The script's arguments.
        backend: The backend of kerasdist for the script, in place of the one that kerasdist would
            choose for Keras's backend.

    Raises:
        InputError: If the script makes no training step.
    """
    silent = redirect_stdout(sys.stderr)
    with registry.used(backend), shapes.of_large_variables(), silent, ExitStack() as stack:
        # `keras.Model` does not define these methods itself, but inherits them. So Keras's methods
        # are back as soon as the attributes that are set here are deleted.
        for name in _METHODS:
            setattr(keras.Model, name, _until_first_step(name))
            stack.callback(delattr, keras.Model, name)
        try:
            _run(script, arguments)
        except _Reached as reached:
            return reached.step
        except SystemExit as ended:
            raise _no_step(script, f"the script ended with exit code {ended.code!r}") from ended
    raise _no_step(script, "the script ended")


def _no_step(script: str, what: str) -> InputError:
    return InputError(
        "Expected a script that calls model.fit or model.train_on_batch. Received: "
        f"script={script!r}; {what} before either was called. A custom loop cannot be planned: "
        "give module:function, which returns a compiled model and a global batch."
    )


def _run(script: str, arguments: Sequence[str]) -> None:
    sys.argv = [script, *arguments]
    if ":" in script and not Path(script).exists():
        sys.path.insert(0, str(Path.cwd()))
        made = pkgutil.resolve_name(script)()
        if not isinstance(made, tuple) or len(made) != 2:
            raise InputError(
                "Expected a function that returns a compiled model and a global batch. Received: "
                f"{script} returned {type(made).__name__}. Return (model, (x, y))."
            )
        model, batch = made
        model.train_on_batch(*batch) if isinstance(batch, tuple) else model.train_on_batch(batch)
    elif Path(script).is_file():
        sys.path.insert(0, str(Path(script).parent.resolve()))
        runpy.run_path(script, run_name="__main__")
    else:
        raise InputError(
            "Expected a file, or module:function, which returns a compiled model and a batch. "
            f"Received: script={script!r}, which is neither."
        )


def _until_first_step(name: str) -> Any:
    """Returns a training method for `keras.Model` whose first step ends the script."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        own = getattr(super(keras.Model, self), name)
        given = inspect.signature(own).bind(*args, **kwargs).arguments
        # Callbacks are left out, because they may write files as soon as training begins.
        silent = {"callbacks": None, "verbose": 0} if name == "fit" else {}
        GET_JAX_STATE.require()
        replaced: dict[str, Any] = {"make_train_function": _make_train_function}
        replaced[GET_JAX_STATE.attribute] = _get_jax_state
        for attribute, value in replaced.items():
            object.__setattr__(self, attribute, value.__get__(self))
        try:
            return own(**{**given, **silent})
        except _Reached as reached:
            if name == "fit":
                reached.step = replace(reached.step, examples=_examples_in(given))
            raise

    return method


def _examples_in(given: Mapping[str, Any]) -> int | None:
    """Returns how many examples `fit` trains on; None if `x` does not consist of arrays."""
    leaves: list[Any] = keras.tree.flatten(given.get("x"))
    shapes: list[tuple[int, ...]] = [getattr(one, "shape", ()) for one in leaves]
    if not shapes or not all(shapes):
        return None
    # Keras, too, rounds the number of training examples down.
    return math.floor(shapes[0][0] * (1.0 - (given.get("validation_split") or 0.0)))


def _make_train_function(self: object, force: bool = False) -> None:
    ours = trainer_of(self)
    if ours is not None:
        ours.made.add("make_train_function")

    def step(_: object, iterator: Iterator[Any]) -> None:
        trainer = trainer_of(self)
        if trainer is None:
            raise _Reached(FirstStep(self, next(iterator), None))
        name, made = type(trainer.strategy).__name__, ownership.variables_of(trainer.strategy)
        raise _Reached(FirstStep(self, next(iterator), name, made))

    object.__setattr__(self, "train_function", step)


def _get_jax_state(self: object, **which: bool) -> tuple[()]:
    """Replaces Keras's method, which would remove the values from the model's variables.

    The result may be empty, because no training step runs and uses it.
    """
    return ()


_NEEDED = re.compile(r"Used ([\d.]+)([KMGT]?) of")


def sharding_of(model: keras.Model) -> Any:
    """Returns the `sharding` of a model's strategy, or that of ``--sharding`` if it is given."""
    layout = _layout_of(model)
    return None if layout is None else layout.sharding


def described(step: FirstStep) -> ModelLayout:
    """Returns the layout of the model's variables: how much of each variable a device holds.

    Raises:
        InputError: If a LayoutMap does not fit the variables.
    """
    model, layout = step.model, _layout_of(step.model)
    try:
        found = ModelLayout(model)
        if layout is not None and layout.rule is not None:
            # A key of a LayoutMap that matches no variable is an error. The map may have keys for
            # several models, so it first sees the variables of all models of the strategy.
            layout.of_variables(step.variables)
            layout.rule.require_useful([*model.variables, *model.optimizer.variables])
    except ValueError as error:
        raise InputError(str(error)) from error
    return found


def _layout_of(model: keras.Model) -> Any:
    """Returns the `Layout` of the devices of a model's strategy; None without a strategy."""
    trainer = trainer_of(model)
    return None if trainer is None else trainer.replicas.logical_devices


def compiler(model: keras.Model, batch: object, report: Callable[[str], None]) -> Compile:
    """Returns a function that compiles a model's training step for a target and a batch size.

    Args:
        model: A compiled and built model.
        batch: A batch of any size, which shows the shapes and types of an example.
        report: A function that gets messages about the progress.
    """
    trainer = trainer_of(model)
    of_script, sharding = _layout_of(model), sharding_of(model)
    logical = 1 if of_script is None else of_script.splits.logical_devices

    def compile_step(target: Target, examples: int) -> Compilation:
        if target.devices % logical:
            raise UnsupportedError(
                f"Expected a multiple of {logical}, the number of devices of a replica. Received: "
                f"devices={target.devices} ({target}). Choose another target."
            )
        report(f"compiling for {target}, {examples} examples a device ...")
        offload = of_script is not None and of_script.offload
        devices = ahead_of_time.described_devices(target)
        layout = Layout(devices, logical, sharding, offload=offload)
        if trainer is not None and of_script is not None:
            layout.adopt(of_script)
            trainer.replicas.logical_devices = layout
        shapes = ahead_of_time.resized(batch, examples * target.devices)
        program = ahead_of_time.training_program(model, shapes, layout)
        return _facts(program, target, examples)

    return compile_step


def _facts(program: TrainingProgram, target: Target, examples: int) -> Compilation:
    compiled = ahead_of_time.compiled(program)
    flops = {kind: count / target.devices for kind, count in program.matmul_flops.items()}
    found = [_named(each, program, target) for each in collectives(compiled.text)]
    needed = _NEEDED.search(compiled.refused or "")
    # XLA writes the size with a unit, such as 15.75G.
    size = float(needed[1]) * 1024.0 ** " KMGT".index(needed[2] or " ") if needed else 0.0
    return Compilation(
        batch=examples,
        memory=compiled.memory,
        work=Work(flops, *device_work(compiled.text), host_bytes=program.host_bytes),
        collectives=found,
        refused=compiled.refused,
        refused_bytes=size,
    )


def _named(each: Collective, program: TrainingProgram, target: Target) -> Collective:
    """Returns a collective of the program, with the value of `devices` that a plan needs.

    If a replica has several devices, and the collective runs inside of each replica, `devices` is
    the number of devices of a replica. Otherwise `devices` is 0, which means all devices.
    """
    logical = program.logical_devices
    within = logical if 1 < logical < target.devices and each.devices == logical else 0
    return Collective(each.kind, each.bytes, within, each.overlap)
