"""The strategy with one replica on every device of every worker."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, final

from kerasdist.api.options import CommunicationOptions, options_of
from kerasdist.api.strategy import Strategy
from kerasdist.backends import registry
from kerasdist.backends.base import random_states
from kerasdist.backends.base.interface import Backend, BatchNorm, Check, ReplicaOptions, ReplicaSet
from kerasdist.cluster.detection import detect
from kerasdist.cluster.resolver import ClusterResolver
from kerasdist.cluster.source import Membership
from kerasdist.core.devices import Device
from kerasdist.core.sharding import Offload
from kerasdist.job.job import Job, join_job
from kerasdist.strategies.arguments import (
    ShardingOption,
    checked_resolver,
    described,
    named_devices,
    replica_options,
)
from kerasdist.strategies.choice import agree, chosen_devices, devices_of_worker, own_part, prepare
from kerasdist.training import hooks

# The accelerators of this worker's first strategy, if the script did not name devices. Later
# strategies of the worker use the same accelerators.
_own: list[Device] = []


@final
class MultiWorkerMirroredStrategy(Strategy):
    """Synchronous training on the devices of several workers, on one machine or more.

    A worker is a process, and all workers run the same script. Environment variables tell a process
    which worker it is, and where the other workers are (``kerasdist info`` shows these variables).
    The devices of each worker hold replicas of the model. Every worker reads the same data in the
    same order, and computes its own rows of every global batch. On every worker, ``fit``,
    ``evaluate`` and ``predict`` return the same as on one device.

    The constructor waits until all workers have joined the job. The strategy must be the first
    thing that a script makes with Keras, before tensors, models and random seeds. In a job of one
    worker the strategy behaves like a `MirroredStrategy`.

    Example::

        strategy = kd.MultiWorkerMirroredStrategy()  # at the top of the script
        with strategy.scope():
            model = build_model()
            model.compile(optimizer="adam", loss="mse")
        model.fit(x, y, batch_size=32)  # 32 examples over all workers

    Source:
    https://www.tensorflow.org/api_docs/python/tf/distribute/MultiWorkerMirroredStrategy
    """

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None = None,
        communication_options: CommunicationOptions | None = None,
        *,
        devices: Sequence[str] | None = None,
        batch_norm: BatchNorm | None = None,
        check: Check | None = None,
        sharding: ShardingOption = None,
        offload: Offload | None = None,
        **earlier: Any,
    ) -> None:
        """Makes the strategy. All workers must make the strategy.

        Args:
            cluster_resolver: Describes the workers; None: `kerasdist.cluster.detect` finds them.
            communication_options: How gradients are exchanged.
            devices: The devices of this worker. Every worker must have the same number of devices.
                None means all accelerators of the machine, divided among the workers that see the
                same accelerators. If there is no accelerator, None means all CPU devices.
                Once the strategy is made, TensorFlow and JAX see only this worker's GPUs, numbered
                from 0; PyTorch still sees all GPUs, with unchanged numbers.
            batch_norm: The same as in `MirroredStrategy`.
            check: The same as in `MirroredStrategy`.
            sharding: The same as in `MirroredStrategy`. The mesh of a LayoutMap has the devices of
                all workers, numbered from 0 in the order of the workers: ``"gpu:8"`` is the first
                device of worker 1 if each worker has eight. On JAX all devices of one replica must
                belong to one worker; on PyTorch each device is a worker.
            offload: The same as in `MirroredStrategy`.
            **earlier: `communication`, which ``tf.distribute.experimental`` had in place of
                `CommunicationOptions.implementation`. Also `num_gpus` and `num_gpus_per_worker`,
                as in `MirroredStrategy`.

        Raises:
            TypeError: If an argument is unknown or has a wrong type.
            ClusterError: If environment variables contradict each other about the cluster.
            JobError: If the workers do not find each other.
            DisagreementError: If the workers differ in versions or in their number of devices.
            DeviceError: If a device is unknown or named twice, or there is no device.
            UnsupportedError: If the backend does not support the value of an argument.
        """
        implementation = earlier.pop("communication", None)
        if implementation is not None and communication_options is None:
            communication_options = CommunicationOptions(implementation=implementation)
        devices = named_devices(devices, earlier)
        communication = options_of(
            CommunicationOptions, communication_options, "communication_options"
        )
        backend = registry.current()
        options = replica_options(
            sharding, batch_norm, check, communication=communication, offload=offload
        )
        self._resolver = checked_resolver(cluster_resolver) or detect()
        place = None if self._resolver is None else self._resolver.membership()
        if place is None or place.num_workers == 1:
            super().__init__(backend.replica_set(chosen_devices(backend, devices), options))
        else:
            super().__init__(replicas_of_job(backend, place, devices, options))
        hooks.install()


def replicas_of_job(
    backend: Backend, place: Membership, names: Sequence[str] | None, options: ReplicaOptions
) -> ReplicaSet:
    """Joins the job, and returns the replicas on the devices of all its workers.

    All workers must call this function.
    """
    prepare(backend, names)
    job, is_new = join_job(place, _versions(backend))
    if is_new:
        devices = _connected(backend, job, names)
    else:
        devices = (_own if names is None else ()) or chosen_devices(backend, names)
    job.assert_equal("number of devices a worker", {"devices": len(devices)})
    chosen = {
        "check": options.check,
        "batch_norm": options.batch_norm,
        "sharding": described(options.sharding),
        "offload": options.offload,
        "settings": backend.settings(),
    }
    job.assert_equal("options of the strategy", chosen)
    replicas = backend.replica_set(devices, options, job)
    if is_new:
        job.after_connecting()
    random_states.ensure_equal(job, begins=True)
    return replicas


def _connected(backend: Backend, job: Job, names: Sequence[str] | None) -> Sequence[Device]:
    """Starts the framework on this worker's devices, and returns these devices."""
    choice = agree(backend, job, names)
    found = backend.connect(job, choice.numbers)
    if choice.numbers:
        devices = devices_of_worker(backend, choice.numbers, found, names)
    else:
        devices = chosen_devices(backend, names)
    if names is None:
        devices = own_part(devices, choice.peers, job.rank)
        _own[:] = [device for device in devices if device.kind != "cpu"]
    return devices


def _versions(backend: Backend) -> dict[str, Any]:
    return {
        "backend": backend.name,
        **{name: sys.modules[name].__version__ for name in ("keras", backend.name)},
    }
