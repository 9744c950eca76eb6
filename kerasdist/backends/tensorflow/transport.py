"""The one collective there is between workers: a sum."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import tensorflow as tf

from kerasdist.backends.tensorflow.gradients import native_options
from kerasdist.backends.tensorflow.values import wrapped
from kerasdist.backends.tensorflow.workers_seam import WorkersStrategy
from kerasdist.collectives import CommunicationOptions
from kerasdist.errors import UnsupportedError

# One value: a tensor for each lane. A lane is what takes part in a collective: a device of this
# process, or the process where its devices share their memory.
Column = Sequence[tf.Tensor]

# Types that TensorFlow's collectives take.
_TRAVELLING = (tf.bfloat16, tf.float16, tf.float32, tf.float64, tf.int32, tf.int64)


@final
class Transport:
    """Sums values over the lanes of all workers.

    Attributes:
        lanes: The names of this worker's devices that take part.
    """

    def __init__(
        self,
        engine: WorkersStrategy,
        lanes: Sequence[str],
        timeout: float,
        is_watched: Callable[[], bool],
    ) -> None:
        """Prepares it.

        Args:
            engine: The strategy of the workers.
            lanes: The names of this worker's devices that take part.
            timeout: How long to wait in a collective, in seconds.
            is_watched: Returns whether the job ends if what is done now stands still.
        """
        self.lanes = lanes
        self._engine = engine
        self._timeout = timeout
        self._is_watched = is_watched
        with tf.device(lanes[0]):
            self._order = tf.Variable(tf.zeros([]), trainable=False)

    def sums(self, columns: Sequence[Column], options: CommunicationOptions) -> list[Column]:
        """Returns the sum of each of several values over the lanes of all workers.

        Args:
            columns: The values; as many, of the same types and shapes, on all workers.
            options: How to communicate.
        """
        results: list[Column] = [[]] * len(columns)
        for pack in _packs(columns, options.bytes_per_pack):
            for index, column in zip(
                pack, self._sums_of_pack([columns[one] for one in pack], options), strict=True
            ):
                results[index] = column
        return results

    def _sums_of_pack(
        self, columns: Sequence[Column], options: CommunicationOptions
    ) -> list[Column]:
        """The sums of values of one type, as one vector."""
        dtype = columns[0][0].dtype
        travelling = _travelling(dtype)
        by_lane = [list(lane) for lane in zip(*columns, strict=True)]

        def vector(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
            flat = [tf.reshape(one, [-1]) for one in tensors]
            return tf.cast(flat[0] if len(flat) == 1 else tf.concat(flat, 0), travelling)

        def taken_apart(total: tf.Tensor, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
            total = tf.cast(total, dtype)
            sizes = [_static_or(tf.size, one, one.shape.num_elements()) for one in tensors]
            flat = [total] if len(tensors) == 1 else tf.split(total, sizes)
            return [
                tf.ensure_shape(
                    tf.reshape(part, _static_or(tf.shape, one, _known_shape(one))), one.shape
                )
                for part, one in zip(flat, tensors, strict=True)
            ]

        totals = self._total(self._on_lanes(vector, by_lane), options)
        return list(zip(*self._on_lanes(taken_apart, totals, by_lane), strict=True))

    def _on_lanes(self, function: Callable[..., Any], *per_lane: Sequence[Any]) -> list[Any]:
        results = []
        for device, *args in zip(self.lanes, *per_lane, strict=True):
            with tf.device(device):
                results.append(function(*args))
        return results

    def _total(
        self, vectors: Sequence[tf.Tensor], options: CommunicationOptions
    ) -> list[tf.Tensor]:
        """The sum of all workers' vectors, on each lane: the only collective there is."""
        placed = self._on_lanes(tf.identity, vectors)
        if len(placed) == 1:
            return self._on_lanes(lambda one: self._sum_of_workers(one, options), placed)
        given = wrapped(self._engine, placed)
        [total] = self._engine.extended.batch_reduce_to(
            tf.distribute.ReduceOp.SUM, [(given, given)], native_options(options)
        )
        return list(self._engine.experimental_local_results(total))

    def _sum_of_workers(self, vector: tf.Tensor, options: CommunicationOptions) -> tf.Tensor:
        """A collective in which each worker takes part once.

        TensorFlow's own asks the chief for a new number each time: a millisecond, and it fails with
        ``steps_per_execution``, as compiled functions in loops are not fed such numbers. Ours come
        one after another, by the order token, so that numbers may be used again. They must be equal
        on all workers, whatever each has compiled anew, and others for other sizes and types.
        """
        size = tf.size(vector, tf.int64)
        key = size * len(_TRAVELLING) + _TRAVELLING.index(vector.dtype)
        return tf.raw_ops.CollectiveReduceV2(
            input=vector,
            group_size=self._engine.num_workers,
            group_key=self._engine.group_key,
            instance_key=tf.cast(key % tf.int32.max, tf.int32),
            ordering_token=[self._order.handle],
            merge_op="Add",
            final_op="Id",
            communication_hint=native_options(options).implementation.value,
            timeout_seconds=options.timeout_seconds or self._seconds_to_wait(),
        )

    def _seconds_to_wait(self) -> float:
        """How long a collective waits by itself, 0 for ever.

        TensorFlow starts two threads for each collective with a time-out, which sleep to the end of
        it, however soon the collective is done. 50 steps a second with 10 minutes each are 60,000
        threads, of which the process dies (seen with 2.21: base_collective_executor.cc would have
        a thread do it for all). So where the job ends when nothing moves, it is left to that.
        """
        return 0.0 if self._is_watched() else self._timeout


def _packs(columns: Sequence[Column], bytes_per_pack: int) -> list[list[int]]:
    """Which values are summed together, by their numbers: those of a type, as many as allowed."""
    packs: list[list[int]] = []
    open_packs: dict[tf.DType, tuple[list[int], int]] = {}
    for index, column in enumerate(columns):
        dtype = column[0].dtype
        pack, size = open_packs.get(dtype, ([], 0))
        if not pack or (bytes_per_pack and size >= bytes_per_pack):
            pack, size = [], 0
            packs.append(pack)
        pack.append(index)
        size += (column[0].shape.num_elements() or 0) * dtype.size
        open_packs[dtype] = pack, size
    return packs


def _travelling(dtype: tf.DType) -> tf.DType:
    if dtype in _TRAVELLING:
        return dtype
    if dtype.is_integer:
        return tf.int64
    raise UnsupportedError(
        "Expected numbers that travel between workers: integers, or floats of 16 bits or more. "
        f"Received: dtype={dtype.name}. Cast them first, with keras.ops.cast."
    )


def _known_shape(tensor: tf.Tensor) -> Any:
    return tensor.shape.as_list() if tensor.shape.is_fully_defined() else None


def _static_or(function: Callable[[Any], Any], tensor: tf.Tensor, known: Any) -> Any:
    return function(tensor) if known is None else known
