"""One replica on every device of every worker, with equal variables on each."""

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

# The accelerators that this worker has taken, where none were named: for further strategies too.
_own: list[Device] = []


@final
class MultiWorkerMirroredStrategy(Strategy):
    """Synchronous training on the devices of several workers: processes, on one machine or many.

    All workers run the same script. Environment variables tell a process which worker it is, and
    where the others are (``kerasdist info`` shows what it finds there). Each worker's devices hold
    replicas of the model. Every worker reads the same data in the same order and computes its rows
    of every global batch; ``fit``, ``evaluate`` and ``predict`` return on every worker what they
    return on one device.

    Making it waits until all workers have come, and must be the first thing that a script does with
    Keras, before tensors, models and random seeds. In a job of one it is a `MirroredStrategy`.

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
        **earlier: Any,
    ) -> None:
        """Makes the strategy. All workers must call it.

        Args:
            cluster_resolver: Who takes part; None: `kerasdist.cluster.detect` finds it out.
            communication_options: How gradients are exchanged.
            devices: This worker's devices; as many on every worker. None: all accelerators of the
                machine, divided among those of its workers that see the same ones; where there is
                none, all CPU devices. After that TensorFlow and JAX see this worker's GPUs alone,
                and number them from 0; torch sees all, with the numbers they had.
            batch_norm: As in `MirroredStrategy`.
            check: As in `MirroredStrategy`.
            sharding: As in `MirroredStrategy`. The mesh of a LayoutMap has the devices of all
                workers, numbered from 0 in the order of the workers: ``"gpu:8"`` is the first one
                of worker 1 where each has eight. A replica's devices belong to one worker.
            **earlier: `communication`, which ``tf.distribute.experimental`` had for the
                `implementation` of the options; and those of 2018 as in `MirroredStrategy`.

        Raises:
            TypeError: If an argument is something else.
            ClusterError: If the environment contradicts itself.
            JobError: If the workers do not come together.
            DisagreementError: If they differ in versions or in their number of devices.
            DeviceError: If a device is unknown, named twice, or there is none.
            UnsupportedError: If the backend cannot have what is asked for.
        """
        implementation = earlier.pop("communication", None)
        if implementation is not None and communication_options is None:
            communication_options = CommunicationOptions(implementation=implementation)
        devices = named_devices(devices, earlier)
        communication = options_of(
            CommunicationOptions, communication_options, "communication_options"
        )
        backend = registry.current()
        options = replica_options(sharding, batch_norm, check, communication=communication)
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
    """Joins the job; returns the replicas on all workers' devices. All workers must call it."""
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
        "settings": backend.settings(),
    }
    job.assert_equal("options of the strategy", chosen)
    replicas = backend.replica_set(devices, options, job)
    if is_new:
        job.after_connecting()
    random_states.ensure_equal(job, begins=True)
    return replicas


def _connected(backend: Backend, job: Job, names: Sequence[str] | None) -> Sequence[Device]:
    """Starts the framework on this worker's devices, and returns them."""
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
