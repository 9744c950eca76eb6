"""Options for distributing a dataset, and the contexts that user functions get."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

from kerasdist.api.options import convert_field


class InputReplicationMode(enum.Enum):
    """How often `Strategy.distribute_datasets_from_function` calls its function.

    Example::

        mode = kd.InputReplicationMode.PER_WORKER  # the default
        options = kd.InputOptions(experimental_replication_mode=mode)

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/InputReplicationMode
    """

    PER_WORKER = "PER_WORKER"
    PER_REPLICA = "PER_REPLICA"


class AutoShardPolicy(enum.Enum):
    """Which data a worker reads, in a job of several workers.

    Example::

        options = kd.InputOptions(auto_shard_policy=kd.AutoShardPolicy.DATA)

    Source: https://www.tensorflow.org/api_docs/python/tf/data/experimental/AutoShardPolicy

    Attributes:
        AUTO: All workers read one dataset in the same order, and each takes its own rows of every
            global batch. The global batches are the same as on one device.
        BATCH: The same as AUTO.
        DATA: Each worker takes every W-th batch of the dataset, where W is the number of workers.
            The worker divides the rows of each of these batches among W steps.
        FILE: Each worker reads every W-th file of a ``tf.data`` pipeline. The worker divides the
            rows of each batch from these files among W steps.
        OFF: Each worker's dataset has only that worker's data: a global batch consists of one batch
            of each worker.
    """

    AUTO = "AUTO"
    FILE = "FILE"
    DATA = "DATA"
    BATCH = "BATCH"
    OFF = "OFF"

    @property
    def keeps_global_batches(self) -> bool:
        """Whether the global batches are the same as on one device."""
        return self in (AutoShardPolicy.AUTO, AutoShardPolicy.BATCH)


@dataclass(frozen=True)
class InputOptions:
    """How a dataset is distributed among workers and devices.

    Example::

        options = kd.InputOptions(auto_shard_policy="DATA")
        dataset = strategy.distribute_dataset([(x[:16], y[:16])], options)

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/InputOptions

    Attributes:
        experimental_fetch_to_device: Whether batches go to their replica's device before they are
            needed; None means True.
        experimental_replication_mode: Whether a dataset function is called once per worker or once
            per replica.
        experimental_place_dataset_on_device: Whether the dataset itself is placed on the replica's
            device. This is possible on TensorFlow, for a function that returns a
            ``tf.data.Dataset``, with `PER_REPLICA` and without `experimental_fetch_to_device`.
        experimental_per_replica_buffer_size: How many batches are fetched ahead; 0 for none. On
            CPUs kerasdist fetches no batch ahead, except on JAX in a job of several workers.
        auto_shard_policy: Which data a worker reads. None means the policy in the dataset's own
            ``tf.data.Options``, or `AutoShardPolicy.AUTO` if the dataset has no options. You may
            also pass a policy's name, such as ``"FILE"``.
    """

    experimental_fetch_to_device: bool | None = True
    experimental_replication_mode: InputReplicationMode = InputReplicationMode.PER_WORKER
    experimental_place_dataset_on_device: bool = False
    experimental_per_replica_buffer_size: int = 1
    auto_shard_policy: AutoShardPolicy | None = None

    def __post_init__(self) -> None:
        size: Any = self.experimental_per_replica_buffer_size
        if not isinstance(size, int) or size < 0:
            raise ValueError(
                "Expected experimental_per_replica_buffer_size to be 0 or more. Received: "
                f"experimental_per_replica_buffer_size={size!r}."
            )
        if self.experimental_fetch_to_device is None:
            object.__setattr__(self, "experimental_fetch_to_device", True)
        for name in ("experimental_fetch_to_device", "experimental_place_dataset_on_device"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(
                    f"Expected {name} to be True or False. Received: {name}="
                    f"{getattr(self, name)!r}."
                )
        convert_field(self, "experimental_replication_mode", InputReplicationMode)
        mode = self.experimental_replication_mode
        is_ahead = mode is InputReplicationMode.PER_WORKER or self.experimental_fetch_to_device
        if self.experimental_place_dataset_on_device and is_ahead:
            raise ValueError(
                "Expected experimental_place_dataset_on_device with PER_REPLICA and "
                "experimental_fetch_to_device=False. Received: "
                "experimental_place_dataset_on_device=True, experimental_replication_mode="
                f"{mode.name}, experimental_fetch_to_device={self.experimental_fetch_to_device}."
            )
        if self.auto_shard_policy is not None:
            convert_field(self, "auto_shard_policy", AutoShardPolicy)


@dataclass(frozen=True)
class InputContext:
    """Describes an input pipeline that the function of `distribute_datasets_from_function` makes.

    Example::

        def make_batches(context):
            size = context.get_per_replica_batch_size(32)
            return [(x[i : i + size], y[i : i + size]) for i in range(0, len(x), size)]


        dataset = strategy.distribute_datasets_from_function(make_batches)

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/InputContext

    Attributes:
        num_input_pipelines: How many input pipelines there are.
        input_pipeline_id: The number of this input pipeline, from 0.
        num_replicas_in_sync: How many replicas there are.
    """

    num_input_pipelines: int = 1
    input_pipeline_id: int = 0
    num_replicas_in_sync: int = 1

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Returns how many examples of a global batch one replica gets.

        Args:
            global_batch_size: Number of examples in a global batch.

        Raises:
            ValueError: If `global_batch_size` is not a multiple of the number of replicas.
        """
        if global_batch_size % self.num_replicas_in_sync:
            raise ValueError(
                "Expected global_batch_size to be a multiple of the number of replicas. Received: "
                f"global_batch_size={global_batch_size}, "
                f"num_replicas_in_sync={self.num_replicas_in_sync}."
            )
        return global_batch_size // self.num_replicas_in_sync


@dataclass(frozen=True)
class ValueContext:
    """Describes the replica for which `distribute_values_from_function` calls its function.

    Example::

        values = strategy.distribute_values_from_function(
            lambda context: keras.ops.full((), context.replica_id_in_sync_group)
        )

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/experimental/ValueContext

    Attributes:
        replica_id_in_sync_group: The replica's number, from 0.
        num_replicas_in_sync: How many replicas there are.
    """

    replica_id_in_sync_group: int = 0
    num_replicas_in_sync: int = 1
