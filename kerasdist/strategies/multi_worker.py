"""One replica on every device of every worker, with equal variables on each."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Sequence
from typing import Any, final

from kerasdist.backends import registry
from kerasdist.backends.base import Backend, ReplicaSet
from kerasdist.backends.options import BatchNorm, Check, ReplicaOptions, checked_batch_norm
from kerasdist.cluster.detection import detect
from kerasdist.cluster.membership import Membership
from kerasdist.cluster.resolver import ClusterResolver
from kerasdist.collectives import CommunicationOptions
from kerasdist.devices import Device
from kerasdist.errors import DeviceError
from kerasdist.job import current
from kerasdist.job.job import Job
from kerasdist.strategies.choice import chosen_devices, prepare
from kerasdist.strategy import Strategy
from kerasdist.training import equal_randomness, hooks
from kerasdist.training.check_mode import check_mode

# The variables with which schedulers limit the accelerators of a process.
_VISIBLE = (
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "TPU_VISIBLE_CHIPS",
)


@final
class MultiWorkerMirroredStrategy(Strategy):
    """Synchronous training on the devices of several workers: processes, on one machine or many.

    All workers run the same script; who takes part, the environment says (``kerasdist info`` shows
    what is found in it). Each worker's devices hold replicas of the model. Every worker reads the
    same data in the same order and computes its rows of every global batch; ``fit``, ``evaluate``
    and ``predict`` return on every worker what they return on one device.

    Making it waits until all workers have come, and must be the first thing that a script does with
    Keras, before tensors, models and random seeds. In a job of one it is a `MirroredStrategy`.

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
    ) -> None:
        """Makes the strategy. All workers must call it.

        Args:
            cluster_resolver: Who takes part; None: `kerasdist.cluster.detect` finds it out.
            communication_options: How gradients are exchanged.
            devices: This worker's devices; as many on every worker. None: all accelerators of the
                machine, divided among its workers; where there is none, all CPU devices.
            batch_norm: As in `MirroredStrategy`.
            check: As in `MirroredStrategy`.

        Raises:
            TypeError: If `communication_options` is something else.
            ClusterError: If the environment contradicts itself.
            JobError: If the workers do not come together.
            DisagreementError: If they differ in versions or in their number of devices.
            DeviceError: If a device is unknown, named twice, or there is none.
            UnsupportedError: If the backend cannot have what is asked for.
        """
        communication = CommunicationOptions.of(communication_options)
        options = ReplicaOptions(batch_norm=checked_batch_norm(batch_norm), check=check_mode(check))
        self._resolver = cluster_resolver or detect()
        backend = registry.current()
        place = None if self._resolver is None else self._resolver.membership()
        if place is None or place.num_workers == 1:
            super().__init__(backend.replica_set(chosen_devices(backend, devices), options))
        else:
            super().__init__(joined_replicas(backend, place, devices, options, communication))
        hooks.install()

    @property
    def cluster_resolver(self) -> ClusterResolver | None:
        """The resolver of the cluster, None for one worker that no environment describes."""
        return self._resolver


def joined_replicas(
    backend: Backend,
    place: Membership,
    names: Sequence[str] | None,
    options: ReplicaOptions,
    communication: CommunicationOptions,
) -> ReplicaSet:
    """Joins the job; returns the replicas on all workers' devices. All workers must call it."""
    prepare(backend, names)
    job, is_new = current.join(place, _versions(backend))
    if is_new:
        backend.connect(job)
    devices = chosen_devices(backend, names)
    if names is None:
        devices = _own_share(devices, job)
    job.assert_equal("number of devices a worker", {"devices": len(devices)})
    chosen = {"check": options.check, "batch_norm": options.batch_norm}
    job.assert_equal("options of the strategy", chosen)
    replicas = backend.replica_set(devices, options, job, communication)
    if is_new:
        job.after_connecting()
    equal_randomness.ensure(job)
    return replicas


def _versions(backend: Backend) -> dict[str, Any]:
    return {
        "backend": backend.name,
        **{name: sys.modules[name].__version__ for name in ("keras", backend.name)},
    }


def _own_share(devices: tuple[Device, ...], job: Job) -> tuple[Device, ...]:
    """Returns this worker's part of the accelerators that it sees.

    Workers of one machine that see the same accelerators divide them; a scheduler may have given
    each its own. Logical CPU devices belong to one process in any case.
    """
    seen = [devices[0].kind, platform.node(), *(os.environ.get(name) for name in _VISIBLE)]
    everyone = job.all_gather_object("accelerators that workers see", seen)
    if devices[0].kind == "cpu":
        return devices
    sharing = [rank for rank, theirs in enumerate(everyone) if theirs == seen]
    share = len(devices) // len(sharing)
    if share == 0:
        raise DeviceError(
            f"Expected an accelerator for each of the {len(sharing)} workers of this machine. "
            f"Received: devices={[str(device) for device in devices]}. Start fewer workers, or "
            "name the devices of each: MultiWorkerMirroredStrategy(devices=[...])."
        )
    number = sharing.index(job.rank)
    return devices[number * share : (number + 1) * share]
