"""Settings that hold for the whole process."""

from __future__ import annotations

import operator
import os
from typing import Literal

from kerasdist.errors import DeviceError

CPU_DEVICES_VARIABLE = "KERASDIST_CPU_DEVICES"

Draws = Literal["replica", "global"]

_draws: Draws = "replica"
_most_at_once: int | Literal["auto"] | None = None


def set_logical_cpu_devices(count: int) -> None:
    """Prepares several CPU devices, to try a strategy on a machine without accelerators.

    They share the machine's cores. On JAX and TensorFlow it must come before the framework starts,
    that is before the first model, tensor or random seed; on PyTorch any time. The variable
    ``KERASDIST_CPU_DEVICES`` does the same when the first strategy is made, and has strategies
    without named devices compute on CPUs even where there are GPUs.

    Args:
        count: How many devices, at least 1.

    Raises:
        DeviceError: If the framework has started with another number of devices.
        TypeError: If `count` is no integer.
        ValueError: If `count` is less than 1.
    """
    from kerasdist.backends import registry  # imported here, since it imports Keras

    if operator.index(count) < 1:
        raise ValueError(f"Expected a positive number of CPU devices. Received: count={count!r}")
    registry.current().prepare_cpu_devices(count)


def wants_cpu_devices() -> bool:
    """Returns whether ``KERASDIST_CPU_DEVICES`` chooses CPU devices before accelerators."""
    return bool(os.environ.get(CPU_DEVICES_VARIABLE))


def apply_cpu_devices_variable() -> None:
    """Prepares the number of CPU devices that ``KERASDIST_CPU_DEVICES`` sets."""
    text = os.environ.get(CPU_DEVICES_VARIABLE)
    if not text:
        return
    if not text.isdecimal() or int(text) < 1:
        raise DeviceError(
            f"Expected the variable {CPU_DEVICES_VARIABLE} to be a positive integer. "
            f"Received: {CPU_DEVICES_VARIABLE}={text!r}"
        )
    set_logical_cpu_devices(int(text))


def set_draws(draws: Draws) -> None:
    """Says whether dropout and noise in `fit` depend on the number of replicas.

    On JAX they do not. On TensorFlow and PyTorch each replica draws numbers of its own by default,
    ``"replica"``, as with `tf.distribute`: a run is reproducible, but drops other units than one
    device, or than another number of replicas. With ``"global"`` each replica draws for the whole
    global batch and keeps its own rows, so that the run has the numbers of one device. It costs
    drawing for the whole batch on each replica.

    It concerns `keras.random.normal`, `uniform`, `truncated_normal`, `randint`, `categorical` and
    `dropout`, and the layers that use them, in `fit`, `evaluate` and `predict`. Other draws,
    and those in `Strategy.run`, stay the replica's own. Where several batches are stacked along
    axis 0, as a GAN does with real and generated examples, the draws of their rows are not one
    device's: call the layer once for each.

    All workers must call it with the same value, before the first step.

    Example::

        kd.config.set_draws("global")

    Args:
        draws: ``"replica"`` or ``"global"``.

    Raises:
        ValueError: If `draws` is neither.
    """
    global _draws
    if draws not in ("replica", "global"):
        raise ValueError(f"Expected draws to be 'replica' or 'global'. Received: draws={draws!r}")
    _draws = draws


def draws() -> Draws:
    """Returns what `set_draws` has set."""
    return _draws


def set_most_examples_at_once(count: int | Literal["auto"] | None) -> None:
    """Says how many examples a replica computes at once in training.

    Where a replica has more, the model is called in several passes. The loss, the metrics and the
    one update are of all of them, so the numbers stay. So a job of fewer workers, each of which has
    more of the global batch, needs no more memory for activations: set what fits on one device, and
    each start of the job takes the passes that it needs. A pass keeps its inputs and outputs, and
    is computed once more in the backward pass, which takes a third more time.

    On PyTorch unseeded dropout draws in each pass, so its draws depend on the number of passes, as
    on that of replicas. What a pass cannot know is an error: `BatchNormalization` that trains,
    losses that layers add, seeded draws and other state that a call changes, on JAX and TensorFlow
    all draws; on PyTorch and TensorFlow ``jit_compile=True``; on PyTorch ``sharding="full"``, and
    `set_draws("global")` with layers that draw. A layer of your own that mixes the rows of a batch
    mixes those of a pass.

    With ``"auto"`` the number is found before the first step of a call of `fit`, by steps on trial:
    as long as a device of any worker has no memory for one, the number is halved. It stays for the
    model, and a backup keeps it for a restart with as many replicas. A model that is known to be
    refused is not tried, and trains as with None. Custom loops find no number.

    All workers must call it with the same value, before the first step.

    Example::

        kd.config.set_most_examples_at_once(32)

    Args:
        count: How many, at least 1; None: all that the replica has; ``"auto"``: as many as there is
            memory for.

    Raises:
        TypeError: If `count` is no integer, and not ``"auto"``.
        ValueError: If `count` is less than 1.
    """
    global _most_at_once
    if count not in (None, "auto") and operator.index(count) < 1:
        raise ValueError(f"Expected a positive number of examples. Received: count={count!r}")
    _most_at_once = count


def most_examples_at_once() -> int | Literal["auto"] | None:
    """Returns what `set_most_examples_at_once` has set."""
    return _most_at_once
