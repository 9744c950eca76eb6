"""Sums by all-reduce, between devices without shared memory and between workers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, final

import tensorflow as tf

from kerasdist.api.options import CommunicationImplementation, CommunicationOptions
from kerasdist.backends.base.collectives import DEFAULT_COMMUNICATION
from kerasdist.backends.tensorflow.fit.batches import HOST
from kerasdist.errors import UnsupportedError
from kerasdist.job.collectives import CollectiveLog, described

if TYPE_CHECKING:
    from kerasdist.job.job import Job

# The tensors of a value, one per lane. A lane is a participant of a collective: one device of this
# process, or the process itself if its devices share memory.
Column = Sequence[tf.Tensor]

# The most bytes that GPUs sum by one collective. With this limit, the gradients of the last layers
# are sent while those of the first layers are still being computed. The limit in PyTorch's
# DistributedDataParallel is 25 MiB.
GPU_PACK_BYTES = 32 * 2**20

# The types that TensorFlow's collectives support.
_TRAVELLING = (tf.bfloat16, tf.float16, tf.float32, tf.float64, tf.int32, tf.int64)


@final
class AllReduce:
    """Sums values over the lanes of all workers.

    Attributes:
        devices: The names of this process's lanes, the devices that take part in a sum: all devices
            of the process, or only one if they share memory.
    """

    def __init__(
        self,
        devices: Sequence[str],
        key: int,
        job: Job | None = None,
        communication: CommunicationOptions = DEFAULT_COMMUNICATION,
    ) -> None:
        """Prepares sums over the job's workers, which have equal numbers of lanes.

        `key` is the group key of the collectives. `communication` has the options for sums that
        have no options of their own.
        """
        self.devices = devices
        self._lanes = len(devices) * (1 if job is None else job.num_workers)
        self._key = key
        self._job = job
        self._communication = communication
        self._collectives = None if job is None else job.collectives
        self.is_recorded = self._collectives is not None
        self._orders = self._on_lanes(lambda: tf.Variable(tf.zeros([]), trainable=False))
        self._one_at_a_time = threading.Lock()
        self._in_one_call = tf.function(self._in_graph, reduce_retracing=True, autograph=False)

    def sums(self, columns: Sequence[Column], options: CommunicationOptions) -> list[Column]:
        """Returns the sum of each of several values over the lanes of all workers."""
        if options is DEFAULT_COMMUNICATION:
            options = self._communication
        results: list[Column] = [[]] * len(columns)
        bytes_per_pack = options.bytes_per_pack or (GPU_PACK_BYTES if _on_gpus(self.devices) else 0)
        for pack in _packs(columns, bytes_per_pack):
            for index, column in zip(
                pack, self._sums_of_pack([columns[one] for one in pack], options), strict=True
            ):
                results[index] = column
        return results

    def _sums_of_pack(
        self, columns: Sequence[Column], options: CommunicationOptions
    ) -> list[Column]:
        """Sums values of one type, which are packed into one vector."""
        dtype = columns[0][0].dtype
        travelling = _travelling(dtype)
        by_lane = [list(lane) for lane in zip(*columns, strict=True)]

        def vector(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
            flat = [tf.reshape(one, [-1]) for one in tensors]
            return tf.cast(flat[0] if len(flat) == 1 else tf.concat(flat, 0), travelling)

        def taken_apart(total: tf.Tensor, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
            total = tf.cast(total, dtype)
            sizes = [one.shape.num_elements() or tf.size(one) for one in tensors]
            flat = [total] if len(tensors) == 1 else tf.split(total, sizes)
            return [
                tf.ensure_shape(tf.reshape(part, tf.shape(one)), one.shape)
                for part, one in zip(flat, tensors, strict=True)
            ]

        totals = self._total(self._on_lanes(vector, by_lane), options)
        return list(zip(*self._on_lanes(taken_apart, totals, by_lane), strict=True))

    def _on_lanes(self, function: Callable[..., Any], *per_lane: Sequence[Any]) -> list[Any]:
        results = []
        for device, *args in zip(self.devices, *per_lane, strict=True):
            with tf.device(device):
                results.append(function(*args))
        return results

    def _total(
        self, vectors: Sequence[tf.Tensor], options: CommunicationOptions
    ) -> list[tf.Tensor]:
        """Returns the sum of the vectors of all lanes and workers, with a copy on each lane."""
        hint = communication_hint(options, self.devices)
        seconds = self._seconds_to_wait(options)
        placed = self._on_lanes(tf.identity, vectors)
        if self._collectives is not None:
            placed = self._recorded(placed, self._collectives)
        if len(placed) > 1 and tf.executing_eagerly():
            # Eager operations run one by one, so the first lane would wait for the second lane,
            # which has not started. A graph runs both at once. A concrete function stays a graph
            # even under `tf.config.run_functions_eagerly`.
            together = self._in_one_call.get_concrete_function(placed, hint, seconds)
            with self._one_at_a_time:  # otherwise devices could mix up the sums of two threads
                return together(placed, hint, seconds)
        return self._in_graph(placed, hint, seconds)

    def _seconds_to_wait(self, options: CommunicationOptions) -> float:
        """Returns a collective's time-out in seconds: 0 (none) if the job itself watches the call.

        For each collective with a time-out, TensorFlow starts two threads that sleep until the
        time-out is over, even if the collective is done before. With 50 steps a second and
        time-outs of 10 minutes that makes 60,000 threads, which kill the process (seen with
        TensorFlow 2.21, in base_collective_executor.cc).
        """
        if options is not self._communication and options.timeout_seconds:
            return options.timeout_seconds
        is_watched = self._job is None or self._job.is_watched
        return 0.0 if is_watched else self._communication.timeout_seconds or 0.0

    def _recorded(self, vectors: Sequence[tf.Tensor], log: CollectiveLog) -> list[tf.Tensor]:
        """Returns the vectors, which become available only after their collective was recorded.

        Records have the order of the collectives, because each record waits for the ordering token
        of the collective before it.
        """
        first, order = vectors[0], self._orders[0]
        entry = described("all_reduce", f"{first.dtype.name} with key {self._key}")

        def record(size: Any) -> list[Any]:
            log.add(f"{entry}, {size} numbers")
            return []

        with tf.control_dependencies([first, order.read_value()]), tf.device(HOST):
            recorded = tf.numpy_function(record, [tf.size(first)], [])
        with tf.control_dependencies([recorded]):
            return self._on_lanes(tf.identity, vectors)

    def _in_graph(self, vectors: Sequence[tf.Tensor], hint: str, seconds: float) -> list[tf.Tensor]:
        """Runs one collective, in which each lane takes part once.

        ``tf.distribute`` asks the chief for a new instance key for each call. This takes a
        millisecond, and fails with ``steps_per_execution``, because functions in loops get no such
        keys. Here an ordering token makes the collectives run one after another, so keys can be
        reused. A key depends only on type and size, so it is equal on all workers even if only some
        of them retrace.
        """

        def collective(vector: tf.Tensor, order: tf.Variable) -> tf.Tensor:
            size = tf.size(vector, tf.int64)
            key = size * len(_TRAVELLING) + _TRAVELLING.index(vector.dtype)
            return tf.raw_ops.CollectiveReduceV2(
                input=vector,
                group_size=self._lanes,
                group_key=self._key,
                instance_key=tf.cast(key % tf.int32.max, tf.int32),
                ordering_token=[order.handle],
                merge_op="Add",
                final_op="Id",
                communication_hint=hint,
                timeout_seconds=seconds,
            )

        return self._on_lanes(collective, vectors, self._orders)


def communication_hint(options: CommunicationOptions, devices: Sequence[str]) -> str:
    """Returns the name of an implementation of collectives in TensorFlow's runtime.

    The runtime knows only lower-case names. For any other name, and for ``auto``, it uses a ring
    through the host's memory.
    """
    chosen = CommunicationImplementation(options.implementation).name.lower()
    if not _on_gpus(devices):
        return "ring" if chosen == "nccl" else chosen
    # NCCL does not support several virtual devices on one GPU. So AUTO chooses NCCL only if each
    # device can have a GPU of its own.
    apart = len(devices) <= len(tf.config.list_physical_devices("GPU"))
    return "nccl" if chosen == "auto" and apart else chosen


def _on_gpus(devices: Sequence[str]) -> bool:
    return all(tf.DeviceSpec.from_string(one).device_type == "GPU" for one in devices)


def _packs(columns: Sequence[Column], bytes_per_pack: int) -> list[list[int]]:
    """Groups the indices of values into packs of one type and at most `bytes_per_pack` bytes.

    If `bytes_per_pack` is 0, there is no limit. A value above the limit is a pack of its own. The
    last values come first, because the collectives run in the order of the packs, and the backward
    pass computes the last layers' gradients first.
    """
    packs: list[list[int]] = []
    open_packs: dict[tf.DType, tuple[list[int], int]] = {}
    for index, column in reversed(list(enumerate(columns))):
        dtype = column[0].dtype
        own = (column[0].shape.num_elements() or 0) * dtype.size
        pack, size = open_packs.get(dtype, ([], 0))
        if not pack or (bytes_per_pack and size + own > bytes_per_pack):
            pack, size = [], 0
            packs.append(pack)
        pack.append(index)
        open_packs[dtype] = pack, size + own
    return packs


def _travelling(dtype: tf.DType) -> tf.DType:
    if dtype in _TRAVELLING:
        return dtype
    if dtype.is_integer:
        return tf.int64
    raise UnsupportedError(
        "Expected numbers that workers can exchange: integers, or floats of 16 bits or more. "
        f"Received: dtype={dtype.name}. Cast them first, with keras.ops.cast."
    )
