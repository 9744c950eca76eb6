"""What workers compare of the first batch of a pipeline: texts that the pipeline itself makes.

A worker sees the global batch in its pipeline alone; a step gets the worker's own rows. So the
pipeline says of its first batch how the arrays begin, and the first step hands that on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from kerasdist.backends.first_batches import ELEMENTS, ROWS, SHOWN, Beginning, names_of

_SEPARATOR = "|"
_BUCKETS = 2**48


def beginnings_of_first(number: tf.Tensor, batch: Any) -> tf.Tensor:
    """Returns a text for each array of an iteration's first batch, and empty ones of the others.

    Args:
        number: The number of the batch in the iteration, from 0.
        batch: A global batch.
    """
    named = [
        (name, leaf)
        for name, leaf in zip(names_of(batch), keras.tree.flatten(batch), strict=False)
        if isinstance(leaf, tf.Tensor) and leaf.shape.rank != 0
    ]
    return (
        tf.cond(
            tf.equal(number, 0),
            lambda: tf.stack([_beginning(name, leaf) for name, leaf in named]),
            lambda: tf.fill([len(named)], ""),
        )
        if named
        else tf.fill([0], "")
    )


def _beginning(name: str, leaf: tf.Tensor) -> tf.Tensor:
    rows = leaf[:ROWS]
    count = tf.shape(rows)[0]
    rows = tf.reshape(rows, [count, tf.size(rows) // tf.maximum(count, 1)])[:, :ELEMENTS]
    digest = tf.strings.to_hash_bucket_fast(tf.io.serialize_tensor(rows), _BUCKETS)
    has_order = tf.reduce_any(tf.not_equal(rows, rows[:1]))
    first = tf.reshape(rows, [-1])[:SHOWN]
    shown = tf.strings.as_string(first, shortest=leaf.dtype.is_floating)
    parts = [digest, tf.cast(has_order, tf.int32)]
    texts = [name, *map(tf.strings.as_string, parts), tf.strings.reduce_join(shown, separator=", ")]
    return tf.strings.join(texts, _SEPARATOR)


def are_known(beginnings: Any) -> bool:
    """Returns whether a batch is the first one of a pipeline that all workers read whole.

    Args:
        beginnings: What `OwnRows` says of it.
    """
    return isinstance(beginnings, tf.Tensor) and len(beginnings) > 0 and bool(beginnings[0] != "")


def read(beginnings: Any) -> Sequence[Beginning]:
    """Returns what workers compare.

    Args:
        beginnings: What `OwnRows` says of a batch, outside of a graph.
    """
    found: list[Beginning] = []
    for text in beginnings.numpy():
        name, digest, has_order, shown = text.decode("utf-8", "replace").split(_SEPARATOR, 3)
        found.append(Beginning(name, f"{int(digest):012x}", has_order == "1", shown))
    return found
