"""Compares the first training step of a model with one device, where user code may mix examples.

On TensorFlow and PyTorch a replica runs that code with its own rows alone. On JAX `fit` is one
global program, whose numbers are those of one device, so nothing is compared there.
"""

from __future__ import annotations

import logging
import math
from typing import Any

import keras

from kerasdist import context, keras_compat
from kerasdist.errors import JobError, NotOneDeviceError
from kerasdist.training import places
from kerasdist.training.comparison import compare
from kerasdist.user_warnings import warn_user

_log = logging.getLogger("kerasdist")
_SHOWN = 3
# Workers that divide a model with more weights may have no room for its whole state, which a step
# on one device needs. With Adam and gradients this many take 256 MiB.
MOST_WHOLE = 1 << 24


def is_wanted(model: Any) -> bool:
    """Returns whether to compare a model's first step; the result is equal on all workers."""
    replicas = model.replica_set
    if replicas.num_replicas == 1 or replicas.options.check == "off":
        return False
    if context.replica() is not None or not any(True for _ in places.user_code(model)):
        return False
    if replicas.options.batch_norm == "per_replica" and any(
        isinstance(layer, keras.layers.BatchNormalization)
        for layer in keras_compat.flat_layers(model)
    ):
        _log.debug("%s: not checked: batch_norm='per_replica' is not one device's.", model.name)
        return False
    if replicas.divides_state and sum(math.prod(one.shape) for one in model.weights) > MOST_WHOLE:
        _log.debug("%s: not checked: too large to be whole on each worker.", model.name)
        return False
    return True


def check(model: Any, batch: Any, size: int) -> bool:
    """Compares the training step on a batch with that of one device, and warns if they differ.

    All workers must call it. Returns False if the batch was too small, so that a later one is
    needed.
    """
    replicas = model.replica_set
    if size < replicas.num_replicas:
        return False
    try:
        comparison = compare(model, batch, wants_layers=False, spares=True)
        if comparison.draws_differ is not None:
            _log.debug("%s: not checked: %s.", model.name, comparison.draws_differ)
            return True
        if not comparison.beyond_rounding:
            _log.debug("%s: the first step equals that of one device.", model.name)
            return True
        where = places.code_of(model, compare(model, batch, wants_layers=True, spares=True))
    except JobError:
        raise
    except Exception as error:  # noqa: BLE001 (the step itself raises it again)
        _log.debug("%s: not checked: %r", model.name, error, exc_info=True)
        return True
    taken = comparison.examples
    of = f"the first batch, of {size} examples"
    of = of if taken == size else f"{taken} of the {size} examples of the first batch"
    message = _message(model, of, comparison.beyond_rounding, where)
    if replicas.options.check == "raise":
        raise NotOneDeviceError(message)
    if replicas.job is None or replicas.job.is_chief:
        warn_user(message)
    else:
        _log.debug("%s", message)  # the chief warns for all
    return True


def _message(model: Any, of: str, found: Any, where: str) -> str:
    shown = "; ".join(map(str, found[:_SHOWN]))
    more = f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return (
        f"The training step of the model {model.name!r} does not compute under "
        f"{model.bound_strategy} what it computes on one device. For {of}: {shown}{more}. Where to "
        f"look: {where}. Each replica runs that code with its own examples alone. If it mixes "
        "examples, or divides by something else than their number, "
        "let it compute on kerasdist.global_batch(tensor), which holds the examples of all "
        "replicas, or reduce by a mean over the examples instead of a sum. "
        "kerasdist.compare_with_one_device(model, x, y) compares again; KERASDIST_CHECK=off leaves "
        "this check out."
    )
