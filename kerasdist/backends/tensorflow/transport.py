"""The one collective there is between devices that share no memory, and between workers: a sum."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import tensorflow as tf

from kerasdist.backends.tensorflow.gradients import native_options
from kerasdist.collectives import CommunicationOptions
from kerasdist.errors import UnsupportedError

# One value: a tensor for each lane. A lane is what takes part in a collective: a device of this
# process, or the process where its devices share their memory.
Column = Sequence[tf.Tensor]

# Types that TensorFlow's collectives take.
_TRAVELLING = (tf.bfloat16, tf.float16, tf.float32, tf.float64, tf.int32, tf.int64)


@dataclass(frozen=True)
class Lanes:
    """What takes part in a sum.

    Attributes:
        here: The names of this process's devices that take part.
        workers: How many processes have as many.
        key: The number that the framework knows this group of devices by.
    """

    here: Sequence[str]
    workers: int
    key: int


@final
class Transport:
    """Sums values over the lanes of all workers."""

    def __init__(self, lanes: Lanes, seconds_to_wait: Callable[[], float]) -> None:
        """Prepares it.

        Args:
            lanes: What takes part.
            seconds_to_wait: Returns how long a collective waits by itself, 0 for ever.
        """
        self.lanes = lanes
        self._seconds_to_wait = seconds_to_wait
        self._orders = self._on_lanes(lambda: tf.Variable(tf.zeros([]), trainable=False))
        self._in_one_call = tf.function(self._in_graph, reduce_retracing=True, autograph=False)

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
        for device, *args in zip(self.lanes.here, *per_lane, strict=True):
            with tf.device(device):
                results.append(function(*args))
        return results

    def _total(
        self, vectors: Sequence[tf.Tensor], options: CommunicationOptions
    ) -> list[tf.Tensor]:
        """The sum of all workers' vectors, on each lane: the only collective there is."""
        hint = communication_hint(options, self.lanes.here)
        seconds = options.timeout_seconds or self._seconds_to_wait()
        placed = self._on_lanes(tf.identity, vectors)
        if len(placed) > 1 and tf.executing_eagerly():
            # Eagerly the first lane would wait for the second one before that has begun. A concrete
            # function stays one where `tf.config.run_functions_eagerly` makes others eager.
            together = self._in_one_call.get_concrete_function(placed, hint, seconds)
            return together(placed, hint, seconds)
        return self._in_graph(placed, hint, seconds)

    def _in_graph(self, vectors: Sequence[tf.Tensor], hint: str, seconds: float) -> list[tf.Tensor]:
        def collective(vector: tf.Tensor, order: tf.Variable) -> tf.Tensor:
            return self._sum_of_lanes(vector, order, hint, seconds)

        return self._on_lanes(collective, vectors, self._orders)

    def _sum_of_lanes(
        self, vector: tf.Tensor, order: tf.Variable, hint: str, seconds: float
    ) -> tf.Tensor:
        """A collective in which each lane takes part once.

        TensorFlow's own asks the chief for a new number each time: a millisecond, and it fails with
        ``steps_per_execution``, as compiled functions in loops are not fed such numbers. Ours come
        one after another, by the order token, so that numbers may be used again. They must be equal
        on all workers, whatever each has compiled anew, and others for other sizes and types.
        """
        size = tf.size(vector, tf.int64)
        key = size * len(_TRAVELLING) + _TRAVELLING.index(vector.dtype)
        return tf.raw_ops.CollectiveReduceV2(
            input=vector,
            group_size=self.lanes.workers * len(self.lanes.here),
            group_key=self.lanes.key,
            instance_key=tf.cast(key % tf.int32.max, tf.int32),
            ordering_token=[order.handle],
            merge_op="Add",
            final_op="Id",
            communication_hint=hint,
            timeout_seconds=seconds,
        )


def communication_hint(options: CommunicationOptions, devices: Sequence[str]) -> str:
    """Returns what TensorFlow's runtime takes for the name of an implementation.

    It knows small letters alone, and takes anything else, also its own ``auto``, for a ring through
    the host's memory.

    Args:
        options: How to communicate.
        devices: The names of this process's devices that take part.
    """
    chosen = native_options(options).implementation.value.lower()
    gpus = [one for one in devices if tf.DeviceSpec.from_string(one).device_type == "GPU"]
    # Several virtual devices on one GPU are refused by NCCL.
    apart = len(gpus) <= len(tf.config.list_physical_devices("GPU"))
    if len(gpus) < len(devices):
        return "ring" if chosen == "nccl" else chosen  # of CPUs, too
    return "nccl" if chosen == "auto" and apart else chosen


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
