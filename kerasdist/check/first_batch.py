"""Compares a model's first training step with the same step on one device.

The steps are compared only if the model has user code, which may mix the examples of a batch.

On TensorFlow and PyTorch a replica runs user code only on its own rows. On JAX `fit` is one global
program, which computes the same as one device, so nothing is compared.
"""

from __future__ import annotations

import gc
import logging
import math
from typing import Any, final

import keras

from kerasdist import keras_compat
from kerasdist.backends.base.model_trainer import require_trainer
from kerasdist.check import memory
from kerasdist.check.comparison import bytes_of_copies, compare
from kerasdist.check.report import places, user_code
from kerasdist.core.context import current
from kerasdist.core.user_warnings import warn_user
from kerasdist.errors import JobError, NotOneDeviceError, VersionError
from kerasdist.job.comparison import first_of

_log = logging.getLogger("kerasdist")
_SHOWN = 3
# If workers shard the state of a model that has more weights than `MOST_WHOLE`, the first step is
# not compared. The step on one device needs the full state, for which a worker may lack memory.
# This many weights take 256 MiB, with their gradients and Adam's variables.
MOST_WHOLE = 1 << 24


def may_differ(model: Any) -> bool:
    """Returns whether the check is on, and the model has several replicas and user code."""
    replicas = require_trainer(model).replicas
    is_wanted = replicas.num_replicas > 1 and replicas.options.check != "off"
    return is_wanted and any(True for _ in user_code(model))


@final
class FirstBatchCheck:
    """Compares a model's first step, and its first step with another batch size.

    Each of the two steps is compared with the same step on one device. A second size is compared,
    because the rows of the first batch may be divided evenly among the replicas, while the rows of
    a later batch are not.
    """

    def __init__(self, model: Any) -> None:
        """Starts a check that has not compared any batch yet."""
        self._model = model
        self._replicas = require_trainer(model).replicas
        self._compared: int | None = None
        self.is_done = False

    @property
    def wants_any(self) -> bool:
        """Whether no batch has been compared yet."""
        return self._compared is None

    def look(self, batch: Any, size: int) -> None:
        """Compares the training step on a batch with the same step on one device.

        If they differ, the option `check` decides whether this method warns or raises a
        NotOneDeviceError. The method does nothing if the check is done, if the batch has the size
        that was already compared, or if there are fewer examples than replicas. All workers must
        call this method.
        """
        replicas, check = self._replicas, self._replicas.options.check
        if self.is_done or size < replicas.num_replicas or size == self._compared:
            return
        is_first, self._compared = self._compared is None, size
        self.is_done = True
        if not self._can_be_compared() or not self._has_room():
            return
        try:
            which = "the first batch" if is_first else "a later batch"
            message = self._message_about(batch, size, which)
        except JobError:
            raise
        except VersionError as error:
            if check == "raise":
                raise
            warn_user(f"The first step is not compared with one device. {error}")
            return
        except Exception as error:  # noqa: BLE001  the training step raises the error again
            if memory.is_lack(error):
                self._log_why(f", for lack of memory: {error}".partition("\n")[0])
            else:
                _log.debug("%s: not checked: %r", self._model.name, error, exc_info=True)
            return
        finally:
            if not replicas.on_cpu:
                gc.collect()  # frees copies of the state that are in reference cycles
        if message is None:
            self.is_done = not is_first
            return
        if check == "raise":
            self.is_done, self._compared = False, None  # the next call must raise the error again
            raise NotOneDeviceError(message)
        if replicas.job is None or replicas.job.is_chief:
            warn_user(message)
        else:
            _log.debug("%s", message)  # the chief warns for all workers

    def _log_why(self, why: str) -> None:
        _log.info("%s: the first step is not compared with one device%s", self._model.name, why)

    def _can_be_compared(self) -> bool:
        model, replicas = self._model, self._replicas
        if current.replica is not None:
            return False
        if replicas.options.batch_norm == "per_replica" and any(
            isinstance(layer, keras.layers.BatchNormalization)
            for layer in keras_compat.flat_layers(model)
        ):
            _log.debug("%s: not checked: batch_norm='per_replica' is not one device's.", model.name)
            return False
        elements = sum(math.prod(one.shape) for one in model.weights)
        if replicas.divides_state and elements > MOST_WHOLE:
            said = "workers that divide so large a model may have no room for all of it."
            self._log_why(f": {said}")
            return False
        return True

    def _has_room(self) -> bool:
        """Returns whether all devices have memory for copies of the state; logs if one does not."""
        least, job = self._replicas.free_bytes(), self._replicas.job
        if job is not None:
            least = job.choose("free memory", least, _least)
        needed = bytes_of_copies(self._model)
        if least is None or needed <= least:
            return True
        sizes = f"{needed // 2**20} MB, and {least // 2**20} MB of the device are free."
        self._log_why(f": copies of the state take {sizes}")
        return False

    def _message_about(self, batch: object, size: int, which: str) -> str | None:
        """Compares a step and returns a message about the differences, None if there are none."""
        model = self._model
        comparison = compare(model, batch, outputs=False, spares=True)
        found, taken = comparison.beyond_rounding, comparison.examples
        if not found:
            _log.debug("%s: the first step equals that of one device.", model.name)
            return None
        where = places(model, compare(model, batch, outputs=True, spares=True))
        of = f"{which}, of {size} examples"
        of = of if taken == size else f"{taken} of the {size} examples of {which}"
        return (
            f"The training step of the model {model.name!r} does not compute under "
            f"{require_trainer(model).strategy} what it computes on one device. For {of}: "
            f"{first_of(list(map(str, found)), _SHOWN)}. Where to look: {where}. "
            f"{_OF_STATE if comparison.keeps_state else _OF_EXAMPLES} "
            "kerasdist.compare_with_one_device(model, x, y) compares again; KERASDIST_CHECK=off "
            "leaves this check out."
        )


def _least(free: list[int | None]) -> int | None:
    return min((one for one in free if one is not None), default=None)


_OF_EXAMPLES = (
    "Each replica runs that code with only its own examples. If it mixes examples, or divides by "
    "something else than their number, let it compute on kerasdist.global_batch(tensor), which "
    "holds the examples of all replicas, or reduce by a mean over the examples instead of a sum."
)
_OF_STATE = (
    "That code computes something else each time: it keeps state in Python outside of the model, "
    "such as a counter in a global or a closure, or an iterator. The replicas of a process share "
    "this state, so each of them changes it in a step. Keep it in an attribute of a layer or the "
    "model, as a number, a list or a dict, of which each replica has its own, or in a Keras "
    "variable; count steps by optimizer.iterations."
)
