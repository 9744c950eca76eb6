"""Settings that apply to the whole process."""

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

    The devices share the machine's cores. On JAX and TensorFlow this function must be called before
    the framework starts, that is before the first model, tensor or random seed; on PyTorch it can
    be called at any time. The environment variable ``KERASDIST_CPU_DEVICES`` does the same when the
    first strategy is made, and also makes strategies without named devices compute on CPUs even if
    there are GPUs.

    Args:
        count: The number of devices, at least 1.

    Raises:
        DeviceError: If the framework has started with another number of devices.
        TypeError: If `count` is not an integer.
        ValueError: If `count` is less than 1.
    """
    from kerasdist.backends import registry  # imported here, because it imports Keras

    if operator.index(count) < 1:
        raise ValueError(f"Expected a positive number of CPU devices. Received: count={count!r}")
    registry.current().prepare_cpu_devices(count)


def wants_cpu_devices() -> bool:
    """Returns whether ``KERASDIST_CPU_DEVICES`` selects CPU devices in place of accelerators."""
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
    """Sets whether dropout and noise in `fit` depend on the number of replicas.

    On JAX dropout and noise do not depend on the number of replicas. On TensorFlow and PyTorch each
    replica draws its own numbers by default (``"replica"``), as with `tf.distribute`. Such a run is
    reproducible, but dropout drops other units than on one device, or than with another number of
    replicas. With ``"global"`` each replica draws for the whole global batch and keeps the draws of
    its own rows, so that the run has the numbers of one device. The cost is the time of these
    larger draws.

    The setting applies to `keras.random.normal`, `uniform`, `truncated_normal`, `randint`,
    `categorical` and `dropout`, and to the layers that use them, in `fit`, `evaluate` and
    `predict`. Other draws, and draws in `Strategy.run`, always differ between replicas. If several
    batches are stacked along axis 0, as a GAN does with real and generated examples, the draws for
    their rows differ from those on one device; call the layer once for each batch instead.

    All workers must call this function with the same value before the first step.

    Example::

        kd.config.set_draws("global")

    Args:
        draws: ``"replica"`` or ``"global"``.

    Raises:
        ValueError: If `draws` has another value.
    """
    global _draws
    if draws not in ("replica", "global"):
        raise ValueError(f"Expected draws to be 'replica' or 'global'. Received: draws={draws!r}")
    _draws = draws


def draws() -> Draws:
    """Returns the value that `set_draws` has set."""
    return _draws


def set_most_examples_at_once(count: int | Literal["auto"] | None) -> None:
    """Sets how many examples a replica computes at once in training.

    If a replica has more examples, the model is called in several passes. The loss, the metrics and
    the single update of the weights use all examples, so the numbers do not change. Passes save
    memory for activations, for example when a job starts with fewer workers, so that each worker
    has more rows of the global batch. Set the number that fits on one device; each start of the job
    then makes as many passes as its replicas need. A pass keeps only its inputs and outputs, and is
    computed once more in the backward pass, so a step takes a third more time.

    On PyTorch dropout without a seed draws in each pass, so its draws depend on the number of
    passes, as they do on the number of replicas. The following raise an error, most of them because
    a pass does not know the other rows: training `BatchNormalization`, losses that layers add, and
    seeded draws or other state that a call changes; on JAX and TensorFlow all draws; on PyTorch and
    TensorFlow ``jit_compile=True``; on PyTorch ``sharding="full"``, and `set_draws("global")` with
    layers that draw. A user-defined layer that mixes the rows of a batch mixes only the rows of a
    pass.

    With ``"auto"`` the number is found by trial steps, before the first step of a call of `fit`: as
    long as a trial step runs out of memory on a device of any worker, the number is halved. The
    model keeps the number. A backup stores it, too, for a restart with the same number of replicas.
    If kerasdist can tell beforehand that the model cannot be computed in passes, it takes no trial
    step, and the model trains as with None. In custom loops no trial steps are taken.

    All workers must call this function with the same value, before the first step.

    Example::

        kd.config.set_most_examples_at_once(32)

    Args:
        count: The number of examples, at least 1; None for all examples of the replica; ``"auto"``
            for as many as there is memory for.

    Raises:
        TypeError: If `count` is neither an integer, nor ``"auto"``, nor None.
        ValueError: If `count` is less than 1.
    """
    global _most_at_once
    if count not in (None, "auto") and operator.index(count) < 1:
        raise ValueError(f"Expected a positive number of examples. Received: count={count!r}")
    _most_at_once = count


def most_examples_at_once() -> int | Literal["auto"] | None:
    """Returns the value that `set_most_examples_at_once` has set."""
    return _most_at_once
