"""One device with plain Keras on it, or several that ``tf.distribute`` holds together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any, final

import keras
import tensorflow as tf

from kerasdist import context
from kerasdist.backends.base import ReplicaOptions, ReplicaSet
from kerasdist.backends.runner import Runner
from kerasdist.backends.sole import SoleRunner
from kerasdist.backends.tensorflow.batches import GlobalBatchAdapter, Piece, pieces
from kerasdist.backends.tensorflow.collectives import TensorFlowCollectives
from kerasdist.backends.tensorflow.engine_seam import (
    EngineScope,
    central_storage_strategy,
    mirrored_strategy,
)
from kerasdist.backends.tensorflow.exchange import Exchange
from kerasdist.backends.tensorflow.launch import in_replicas
from kerasdist.backends.tensorflow.runner import TensorFlowRunner
from kerasdist.backends.tensorflow.trainer import PlacedTrainer, TensorFlowTrainer
from kerasdist.devices import Device
from kerasdist.replica_context import ReplicaContext

if TYPE_CHECKING:
    from kerasdist.strategy import Strategy


@final
class SoleDevice(ReplicaSet):
    """Plain Keras, placed on a device of choice."""

    @cached_property
    def runner(self) -> Runner:
        """How functions of the user's run on the device."""
        return SoleRunner(self.placement)

    @property
    def trainer_class(self) -> type[Any]:
        """Keras's own trainer, told where to run."""
        return PlacedTrainer

    def data_adapter(self, adapter: Any) -> Any:
        """Returns the adapter itself."""
        return adapter

    def placement(self) -> AbstractContextManager[Any]:
        """Returns a scope in which TensorFlow works on this device."""
        return tf.device(_tensorflow_name(self.devices[0]))


@final
class MirroredReplicas(ReplicaSet):
    """Several devices, with a copy of every variable on each.

    Attributes:
        engine: The framework's strategy that holds them together.
        shares_memory: Whether one replica's tensor costs nothing to read in another.
    """

    def __init__(self, devices: Sequence[Device], options: ReplicaOptions) -> None:
        """Starts the engine.

        Args:
            devices: Devices of this machine, none twice.
            options: How to compute.
        """
        super().__init__(devices, options)
        self.shares_memory = all(device.kind == "cpu" for device in self.devices)
        names = [_tensorflow_name(device) for device in self.devices]
        home = options.parameter_device
        self.engine = (
            mirrored_strategy(names, share_memory=self.shares_memory)
            if home is None
            else central_storage_strategy(names, _tensorflow_name(home))
        )

    @cached_property
    def runner(self) -> Runner:
        """How functions of the user's run on the devices."""
        return TensorFlowRunner(self)

    @property
    def trainer_class(self) -> type[Any]:
        """The trainer that divides each batch over the replicas."""
        return TensorFlowTrainer

    def data_adapter(self, adapter: Any) -> Any:
        """Returns an adapter whose global batches Keras does not divide by itself."""
        return GlobalBatchAdapter(adapter)

    def placement(self) -> AbstractContextManager[Any]:
        """Returns a scope in which a Keras variable gets a copy on every device."""
        return EngineScope(self.engine)

    def run(
        self, strategy: Strategy, function: Callable[[Any], Any], batch: Any
    ) -> list[tuple[Piece, Any]]:
        """Calls a function once a replica, in a graph or eagerly.

        Args:
            strategy: The strategy of these replicas.
            function: What each replica does with its rows.
            batch: The global batch.

        Returns:
            For each replica the rows it got, and what the function returned.
        """
        divided = pieces(batch, self.num_replicas)
        exchange = Exchange.of(self.engine)

        def replica_code(replica: int) -> Any:
            piece = divided[replica]
            here = ReplicaContext(
                strategy=strategy,
                replica_id_in_sync_group=replica,
                num_replicas_in_sync=self.num_replicas,
                collectives=TensorFlowCollectives(
                    exchange, replica, piece.share, self.shares_memory
                ),
                share=piece.share,
            )
            with context.replica_scope(here), _after(piece.data):
                return function(piece.data)

        return list(zip(divided, in_replicas(self.engine, replica_code), strict=True))


@contextmanager
def _after(data: Any) -> Iterator[None]:
    """Lets what is done inside wait for the data.

    At the end of the data a step fails where it asks for the next batch. What does not depend on
    the batch, such as the optimizer's counter, must not have happened then. (In plain Keras it has:
    where the number of batches is not known, the optimizer counts one more step than there are.)
    """
    leaf = next(leaf for leaf in keras.tree.flatten(data) if leaf is not None)
    components = tf.nest.flatten(leaf, expand_composites=True)
    with tf.control_dependencies(components[:1]):
        arrived = tf.no_op()
    with tf.control_dependencies([arrived] if arrived is not None else []):
        yield


def _tensorflow_name(device: Device) -> str:
    return f"/device:{device.kind.upper()}:{device.index}"
