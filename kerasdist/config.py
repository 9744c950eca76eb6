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
    """Sets the number of CPU devices, to try a strategy on a machine without accelerators.

    The devices share the machine's cores. On JAX and TensorFlow this function must be called before
    the framework starts, that is before the first model, tensor or random seed; on PyTorch it can
    be called at any time. You can give the number in the environment variable
    ``KERASDIST_CPU_DEVICES`` instead: the devices are then set up when the first strategy is made.
    With this variable, a strategy that is given no device names uses CPUs even if the machine has
    GPUs.

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
    """Sets up as many CPU devices as ``KERASDIST_CPU_DEVICES`` says, if the variable is set."""
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
    replica draws its own numbers by default (``"replica"``), as with `tf.distribute`. Training is
    then reproducible, but dropout drops other units than on one device or on another number of
    replicas. With ``"global"`` each replica draws random numbers for all rows of the global batch,
    and uses only the numbers of its own rows. The results are then those of one device, but drawing
    takes longer.

    The setting applies to `keras.random.normal`, `uniform`, `truncated_normal`, `randint`,
    `categorical` and `dropout`, and to the layers that use them, in `fit`, `evaluate` and
    `predict`. Other random functions, and all random functions in `Strategy.run`, always draw
    different numbers on each replica. A layer may get several batches concatenated along axis 0, as
    in a GAN that concatenates real and generated examples. The numbers that this layer draws then
    differ from those on one device, even with ``"global"``. To avoid this difference, call the
    layer once for each batch.

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

    If a replica has more than `count` examples, a step calls the model several times, each time for
    some of the rows. Each of these calls is called a pass. The loss, the metrics and the single
    update of the weights use all examples, so the results do not change. Passes save memory for
    activations. This helps, for example, if a job restarts with fewer workers than before, because
    each worker then has more rows of the global batch. Set `count` to the number of examples that
    fits on one device; a step then makes as many passes as its replicas need. A pass stores only
    its inputs and outputs, and its activations are computed again for the gradients, so a step
    takes a third more time.

    On PyTorch, dropout without a seed draws new random numbers in each pass. These numbers depend
    on the number of passes, just as they depend on the number of replicas. A user-defined layer
    that mixes the rows of a batch mixes only the rows of a pass.

    The following raise an error, most of them because they need rows that are not in the pass:

    - on all backends, training with `BatchNormalization`, losses that layers add, layers that draw
      random numbers with a seed, and any other layer whose variables a call of the model changes;
    - on JAX and TensorFlow, any random numbers that a call of the model draws;
    - on PyTorch and TensorFlow, ``jit_compile=True``;
    - on PyTorch, ``sharding="full"``, and `set_draws("global")` with layers that draw random
      numbers.

    With ``"auto"`` kerasdist finds the number before the first step of `fit`, by trial steps. A
    trial step computes the gradients of the replica's examples, but updates no variable. In the
    first trial step the model computes all of these examples at once. If a trial step runs out of
    memory on any worker, kerasdist halves the number and takes another trial step. Later calls of
    `fit` use the number that was found. Backups of the training store the number, too, and a
    restart with the same number of replicas uses the stored number. If kerasdist can tell
    beforehand that the model cannot be computed in passes, it takes no trial step, and the model
    trains as with None. In custom loops no trial steps are taken.

    All workers must call this function with the same value, before the first step.

    Example::

        kd.config.set_most_examples_at_once(32)

    Args:
        count: The number of examples, at least 1; None for all examples of the replica; ``"auto"``
            for a number that fits into memory, which kerasdist finds by trial steps.

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
