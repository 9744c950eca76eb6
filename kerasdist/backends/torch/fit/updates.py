"""Keras's optimizers update a strategy's weights in groups.

By itself Keras updates all weights at once, operation after operation, and each operation makes a
temporary value of the size of all weights. Those of a group are small. On a CPU they stay in its
cache, so that an update takes less than half the time.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import keras
import torch

from kerasdist import keras_compat
from kerasdist.backends.torch.workers.buckets import in_buckets
from kerasdist.core import ownership

# The bytes of a group's gradients. A CPU's cache holds a group; a GPU is busy with one.
_BYTES_ON_CPU, _BYTES_ON_GPU = 2**21, 2**28


@cache
def install() -> None:
    """Puts the hook into Keras, once in a process."""
    keras_compat.install(update_in_groups=keras_compat.Method(_in_groups))


def _in_groups(original: Callable[..., None]) -> Callable[..., None]:
    def update(
        optimizer: keras.Optimizer,
        grads: Sequence[torch.Tensor],
        trainable_variables: Sequence[keras.Variable],
        learning_rate: Any,
    ) -> None:
        # The sparse gradients of torch's own embeddings have no size in bytes.
        is_sparse = any(map(operator.attrgetter("is_sparse"), grads))
        is_plain = ownership.strategy_of(trainable_variables[0]) is None
        # An update of Nadam's counts as a step. Of other optimizers that update all weights at
        # once, Keras's own alone, it depends on nothing but the weight and its slots.
        if is_plain or is_sparse or isinstance(optimizer, keras.optimizers.Nadam):
            original(optimizer, grads, trainable_variables, learning_rate)
            return
        most_bytes = _BYTES_ON_CPU if grads[0].device.type == "cpu" else _BYTES_ON_GPU
        for group in in_buckets(dict(enumerate(grads)), most_bytes):
            of_group = [grads[index] for index in group]
            variables = [trainable_variables[index] for index in group]
            original(optimizer, of_group, variables, learning_rate)

    return update
