"""Compares a model's first training step with one device, if user code may mix examples.

On TensorFlow and PyTorch a replica runs that code only on its own rows. On JAX `fit` is one global
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
from kerasdist.check.comparison import Comparison, bytes_of_copies, compare
from kerasdist.check.report import places, user_code
from kerasdist.core.context import current
from kerasdist.core.user_warnings import warn_user
from kerasdist.errors import JobError, NotOneDeviceError, VersionError

_log = logging.getLogger("kerasdist")
_SHOWN = 3
# If workers divide a model with more weights than this, its first step is not compared.
# The step on one device needs the full state, for which workers may lack memory.
# With Adam and gradients this many weights take 256 MiB.
MOST_WHOLE = 1 << 24


def may_differ(model: Any) -> bool:
    """Returns whether user code may make a step differ from one device's, and a check is wanted."""
    replicas = require_trainer(model).replicas
    is_wanted = replicas.num_replicas > 1 and replicas.options.check != "off"
    return is_wanted and any(True for _ in user_code(model))


def _can_be_compared(model: Any) -> bool:
    replicas = require_trainer(model).replicas
    if current.replica is not None:
        return False
    if replicas.options.batch_norm == "per_replica" and any(
        isinstance(layer, keras.layers.BatchNormalization)
        for layer in keras_compat.flat_layers(model)
    ):
        _log.debug("%s: not checked: batch_norm='per_replica' is not one device's.", model.name)
        return False
    if replicas.divides_state and sum(math.prod(one.shape) for one in model.weights) > MOST_WHOLE:
        _log.info(
            "%s: the first step is not compared with one device: workers that divide so large a "
            "model may have no room for all of it.",
            model.name,
        )
        return False
    return True


@final
class FirstBatchCheck:
    """Compares the first training steps of a model, for two sizes of batches, with one device.

    The rows of the first batch may be divided evenly, while the rows of a later batch may not.
    """

    def __init__(self, model: Any) -> None:
        """Starts without a batch."""
        self._model = model
        self._replicas = require_trainer(model).replicas
        self._compared: int | None = None
        self.is_done = False

    @property
    def wants_any(self) -> bool:
        """Whether no batch has been compared yet."""
        return self._compared is None

    def wants(self, size: int) -> bool:
        """Returns whether to compare a batch of this size; all workers get the same answer."""
        return not self.is_done and size >= self._replicas.num_replicas and size != self._compared

    def look(self, batch: Any, size: int) -> None:
        """Compares the training step on a batch with one device, and warns if they differ.

        All workers must call this method.
        """
        is_first, self._compared = self._compared is None, size
        self.is_done = not is_first
        if not _can_be_compared(self._model) or not _has_room(self._model):
            self.is_done = True
            return
        try:
            which = "the first batch" if is_first else "a later batch"
            message = _message_about(self._model, batch, size, which)
        except JobError:
            raise
        except VersionError as error:
            self.is_done = True
            if require_trainer(self._model).strategy.options.check == "raise":
                raise
            warn_user(f"The first step is not compared with one device. {error}")
            return
        except Exception as error:  # noqa: BLE001  the step itself raises the error again
            self.is_done = True
            _leave_out(self._model, error)
            return
        finally:
            if not self._replicas.on_cpu:
                gc.collect()  # copies of the state may stay in reference cycles
        if message is None:
            return
        self.is_done = True
        replicas = self._replicas
        if replicas.options.check == "raise":
            self.is_done, self._compared = False, None  # the next call shall raise the error again
            raise NotOneDeviceError(message)
        if replicas.job is None or replicas.job.is_chief:
            warn_user(message)
        else:
            _log.debug("%s", message)  # the chief warns for all workers


def _has_room(model: Any) -> bool:
    """Returns whether all devices have memory for copies of the state; reports it if not."""
    replicas = require_trainer(model).replicas
    least, job = replicas.free_bytes(), replicas.job
    if job is not None:
        least = job.choose("free memory", least, _least)
    needed = bytes_of_copies(model)
    if least is None or needed <= least:
        return True
    _log.info(
        "%s: the first step is not compared with one device: copies of the state take %d MB, and "
        "%d MB of the device are free.",
        model.name,
        needed // 2**20,
        least // 2**20,
    )
    return False


def _least(free: list[int | None]) -> int | None:
    return min((one for one in free if one is not None), default=None)


def _leave_out(model: keras.Model, error: Exception) -> None:
    if memory.is_lack(error):
        said = str(error).partition("\n")[0]
        _log.info(
            "%s: the first step is not compared with one device, for lack of memory: %s",
            model.name,
            said,
        )
    else:
        _log.debug("%s: not checked: %r", model.name, error, exc_info=True)


def _message_about(model: keras.Model, batch: object, size: int, which: str) -> str | None:
    """Compares a step; returns a message about differences, None if there is none."""
    comparison = compare(model, batch, outputs=False, spares=True)
    if not comparison.beyond_rounding:
        _log.debug("%s: the first step equals that of one device.", model.name)
        return None
    where = places(model, compare(model, batch, outputs=True, spares=True))
    taken = comparison.examples
    of = f"{which}, of {size} examples"
    of = of if taken == size else f"{taken} of the {size} examples of {which}"
    return _message(model, of, comparison, where)


def _message(model: Any, of: str, comparison: Comparison, where: str) -> str:
    found = comparison.beyond_rounding
    shown = "; ".join(map(str, found[:_SHOWN]))
    more = f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    strategy = require_trainer(model).strategy
    return (
        f"The training step of the model {model.name!r} does not compute under {strategy} "
        f"what it computes on one device. For {of}: {shown}{more}. Where to "
        f"look: {where}. {_OF_STATE if comparison.keeps_state else _OF_EXAMPLES} "
        "kerasdist.compare_with_one_device(model, x, y) compares again; KERASDIST_CHECK=off leaves "
        "this check out."
    )


_OF_EXAMPLES = (
    "Each replica runs that code with its own examples alone. If it mixes examples, or divides by "
    "something else than their number, let it compute on kerasdist.global_batch(tensor), which "
    "holds the examples of all replicas, or reduce by a mean over the examples instead of a sum."
)
_OF_STATE = (
    "That code computes something else each time: it keeps state in Python outside of the model, "
    "such as a counter in a global or a closure, or an iterator. The replicas of a process share "
    "that, so it changes once a replica. Keep it in an attribute of a layer or the model, as a "
    "number, a list or a dict, of which each replica has its own, or in a Keras variable; count "
    "steps by optimizer.iterations."
)
