"""One device with plain Keras on it, or several that ``tf.distribute`` holds together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, final

import keras
import tensorflow as tf

from kerasdist import context, keras_seam
from kerasdist.backends import checksums
from kerasdist.backends.base import ReplicaOptions, ReplicaSet
from kerasdist.backends.checks import check_no_compression
from kerasdist.backends.runner import Runner
from kerasdist.backends.sole import SoleRunner
from kerasdist.backends.tensorflow import adoption, outside_replicas, reads, vector_losses
from kerasdist.backends.tensorflow.batches import Piece
from kerasdist.backends.tensorflow.collectives import TensorFlowCollectives
from kerasdist.backends.tensorflow.engine_seam import (
    EngineScope,
    central_storage_strategy,
    mirrored_strategy,
    scopes_left,
)
from kerasdist.backends.tensorflow.exchange import Exchange
from kerasdist.backends.tensorflow.gradients import native_options
from kerasdist.backends.tensorflow.groups import Group, LocalGroup
from kerasdist.backends.tensorflow.launch import in_replicas
from kerasdist.backends.tensorflow.own_batches import WorkerAdapter
from kerasdist.backends.tensorflow.pipelines import GlobalBatchDataset
from kerasdist.backends.tensorflow.runner import TensorFlowRunner
from kerasdist.backends.tensorflow.trainer import (
    LOSS_WATCH,
    PlacedTrainer,
    TensorFlowTrainer,
)
from kerasdist.backends.tensorflow.variables import native
from kerasdist.backends.tensorflow.workers import WorkerGroup
from kerasdist.backends.tensorflow.workers_seam import WorkersStrategy
from kerasdist.collectives import CommunicationImplementation, CommunicationOptions
from kerasdist.devices import Device
from kerasdist.input.adapter import WrappedAdapter
from kerasdist.replica_context import ReplicaContext
from kerasdist.user_warnings import warn_user

if TYPE_CHECKING:
    from kerasdist.backends.trial import Trial
    from kerasdist.job.job import Job
    from kerasdist.strategy import Strategy


@final
class SoleDevice(ReplicaSet):
    """Plain Keras, placed on a device of choice."""

    @cached_property
    def runner(self) -> Runner:
        """How user functions run on the device."""
        return SoleRunner(self.placement)

    @property
    def trainer_class(self) -> type[Any]:
        """Keras's own trainer, told where to run."""
        return PlacedTrainer

    def data_adapter(self, adapter: Any) -> Any:
        """Returns the adapter itself."""
        return adapter

    def following(self, dataset: Any, begin: Callable[[Callable[[], Any]], Any]) -> Any:
        """Returns the dataset with each iteration begun by a function."""
        return GlobalBatchDataset.followed(dataset, begin)

    def placement(self) -> AbstractContextManager[Any]:
        """Returns a scope in which TensorFlow works on this device."""
        return tf.device(_tensorflow_name(self.devices[0]))


@final
class MirroredReplicas(ReplicaSet):
    """Several devices, of this process or of many workers, with a copy of every variable on each.

    Attributes:
        group: The replicas, and the framework's strategy that holds them together.
    """

    def __init__(
        self,
        devices: Sequence[Device],
        options: ReplicaOptions,
        group: Group,
        job: Job | None = None,
    ) -> None:
        """Makes the set.

        Args:
            devices: Devices of this process, none twice.
            options: How to compute.
            group: Their replicas, and those of other workers.
            job: The job of this process, if there are other workers.
        """
        super().__init__(devices, options, job)
        self.group = group
        outside_replicas.serve(group.engine)
        vector_losses.install()

    @cached_property
    def runner(self) -> Runner:
        """How user functions run on the devices."""
        return TensorFlowRunner(self)

    @property
    def trainer_class(self) -> type[Any]:
        """The trainer that divides each batch over the replicas."""
        return TensorFlowTrainer

    def trial(self, model: Any) -> Trial:
        """Returns what a training step is tried with."""
        from kerasdist.backends.tensorflow.trial import TensorFlowTrial  # few programs need it

        return TensorFlowTrial(model)

    def data_adapter(self, adapter: Any) -> Any:
        """Returns an adapter whose global batches Keras does not divide by itself."""
        kind = GroupAdapter if self.job is None else WorkerAdapter
        return kind(adapter, self.group)

    def following(self, dataset: Any, begin: Callable[[Callable[[], Any]], Any]) -> Any:
        """Returns the dataset with each iteration begun by a function."""
        return GlobalBatchDataset.followed(dataset, begin)

    def placement(self) -> AbstractContextManager[Any]:
        """Returns a scope in which a Keras variable gets a copy on every device."""
        return EngineScope(self.group.engine)

    def leaving(self) -> AbstractContextManager[None]:
        """Returns a context in which Keras finds no strategy in force."""
        return scopes_left()

    def calling(self) -> AbstractContextManager[None]:
        """Returns a scope in which variables that other workers write to can be read alone."""
        return self.group.calling()

    def equalize(self, variables: Sequence[Any]) -> None:
        """Gives variables the chief's values, whatever is compiled at the moment."""
        with tf.init_scope(), self.placement():
            self.group.equalize(variables)

    def begin_training(self, model: Any) -> None:
        """Counts the examples of global batches from 0."""
        watch = vars(model).get(LOSS_WATCH)
        if watch is not None:
            watch.forget_examples()

    def take_on(self, model: Any) -> None:
        """Gives all that a model has copies, since its optimizer updates what has some already."""
        adoption.take_on(model, self.group.engine, self.options.batch_norm)
        optimizer = model.optimizer if model.compiled else None
        if optimizer is not None and not optimizer.built and model.built:
            optimizer.build(model.trainable_variables)  # not while Keras traces its step

    def trained_on(self, model: Any) -> list[list[Any]]:
        """Returns what the sizes of all global batches add up to, as this worker counts them."""
        watch = vars(model).get(LOSS_WATCH)
        everyone = [] if watch is None else watch.examples
        return [[1, f"{everyone[self.local_replicas.start]} examples in all"]] if everyone else []

    def checksums(self, variables: Sequence[Any]) -> list[int]:
        """Returns a checksum of each variable's value on this worker's first device."""
        with tf.init_scope():
            copies = [self.group.engine.experimental_local_results(native(v))[0] for v in variables]
            return [checksums.of_array(tf.convert_to_tensor(one)) for one in copies]

    def run(
        self,
        strategy: Strategy,
        function: Callable[[Any], Any],
        batch: Any,
        *,
        updates_wait: bool = False,
    ) -> list[tuple[Piece, Any]]:
        """Calls a function once a replica, in a graph or eagerly.

        Args:
            strategy: The strategy of these replicas.
            function: What each replica does with its rows.
            batch: A batch as the group takes it.
            updates_wait: Whether updates wait for the function to call `end_step`.

        Returns:
            For each replica of this process the rows it got, and what the function returned.
        """
        divided = self.group.pieces(batch)
        exchange = Exchange.of(self.group)

        def replica_code(replica: int) -> Any:
            piece = divided[replica - self.group.local.start]
            collectives = TensorFlowCollectives(exchange, replica, piece.share, waits=updates_wait)
            here = ReplicaContext(
                strategy=strategy,
                replica_id_in_sync_group=replica,
                num_replicas_in_sync=self.num_replicas,
                collectives=collectives,
                share=piece.share,
            )
            with (
                context.replica_scope(here),
                reads.preceded(collectives.before_read),
                _after(piece.data),
            ):
                return function(piece.data)

        return list(zip(divided, in_replicas(self.group, replica_code), strict=True))


def mirrored_replicas(devices: Sequence[Device], options: ReplicaOptions) -> MirroredReplicas:
    """Returns replicas on devices of this process.

    Args:
        devices: Devices of this machine, none twice.
        options: How to compute.
    """
    names = [_tensorflow_name(device) for device in devices]
    home = options.parameter_device
    shares_memory = _share_memory(devices)
    engine = (
        mirrored_strategy(names, share_memory=shares_memory)
        if home is None
        else central_storage_strategy(names, _tensorflow_name(home))
    )
    return MirroredReplicas(devices, options, LocalGroup(engine, shares_memory=shares_memory))


def worker_replicas(
    devices: Sequence[Device],
    options: ReplicaOptions,
    job: Job,
    communication: CommunicationOptions,
) -> MirroredReplicas:
    """Returns replicas on devices of each worker.

    Args:
        devices: Devices of this worker, none twice.
        options: How to compute.
        job: The job of this process.
        communication: How to communicate.
    """
    _check_communication(communication, devices)
    seconds = communication.timeout_seconds or job.timeouts.meeting
    communication = replace(communication, timeout_seconds=seconds)
    engine = WorkersStrategy(
        job.addresses,
        job.rank,
        [_tensorflow_name(device) for device in devices],
        native_options(communication),
    )
    group = WorkerGroup(engine, job, communication, shares_memory=_share_memory(devices))
    return MirroredReplicas(devices, options, group, job)


def _check_communication(options: CommunicationOptions, devices: Sequence[Device]) -> None:
    check_no_compression(options.compression, "TensorFlow")
    kinds = {device.kind for device in devices}
    if options.implementation is CommunicationImplementation.NCCL and kinds != {"gpu"}:
        warn_user(
            "Expected GPUs, for CommunicationImplementation.NCCL. Received: devices="
            f"{[str(device) for device in devices]}. Sums go by RING instead; use AUTO, which is "
            "NCCL where there are GPUs."
        )


@final
class GroupAdapter(WrappedAdapter):
    """A Keras data adapter whose batches a group divides among its replicas."""

    def __init__(self, inner: Any, group: Group) -> None:
        """Wraps an adapter.

        Args:
            inner: The adapter that Keras made for the data of the call.
            group: The replicas.
        """
        super().__init__(inner)
        self._group = group

    def get_tf_dataset(self) -> Any:
        """Returns the inner adapter's batches, as the group takes them."""
        dataset = self._inner.get_tf_dataset()
        # Only slices of arrays are known to be the same whoever reads them, and when.
        if keras_seam.is_array_adapter(self._inner):
            return GlobalBatchDataset.of_arrays(dataset, dataset.element_spec)
        return self._group.batches(dataset)


def _share_memory(devices: Sequence[Device]) -> bool:
    return all(device.kind == "cpu" for device in devices)


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
