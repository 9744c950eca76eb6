"""One replica on every device of this machine, with equal variables on each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from kerasdist.backends import registry
from kerasdist.backends.options import BatchNorm, Check, ReplicaOptions, checked_batch_norm
from kerasdist.errors import UnsupportedError
from kerasdist.strategies.choice import chosen_devices, require_no_other_workers
from kerasdist.strategy import Strategy
from kerasdist.training import hooks
from kerasdist.training.check_mode import check_mode


@final
class MirroredStrategy(Strategy):
    """Synchronous training on several devices of one machine.

    Each device holds a replica of the model; every batch is divided among them, and their gradients
    are combined so that the result is that of one device with the whole batch.

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/MirroredStrategy
    """

    def __init__(
        self,
        devices: Sequence[str] | None = None,
        cross_device_ops: None = None,
        *,
        batch_norm: BatchNorm | None = None,
        check: Check | None = None,
    ) -> None:
        """Makes the strategy.

        Args:
            devices: Names such as ``["gpu:0", "gpu:1"]``. None: all accelerators of this machine,
                or, where there is none, all its CPU devices (see
                `kerasdist.config.set_logical_cpu_devices`). CPU devices that do not exist yet are
                prepared, as long as the backend has not started.
            cross_device_ops: None. ``tf.distribute`` has this argument; here the backend chooses
                the collectives by itself.
            batch_norm: ``"synchronized"``: BatchNormalization uses the global batch, as on one
                device. ``"per_replica"``: each replica's own rows; the moving statistics are
                averaged. Faster, but not the numbers of one device. Not on JAX. None:
                synchronized in `fit`; in custom loops as the layer says, which without
                ``BatchNormalization(synchronized=True)`` is each replica's own rows, as in
                ``tf.distribute``.
            check: Whether the first step of training is compared with the same step on one device
                where code of yours could mix examples: ``"warn"`` if it differs, ``"raise"``, or
                ``"off"``. None: as the variable ``KERASDIST_CHECK`` says, else ``"warn"``. See
                `kerasdist.compare_with_one_device`.

        Raises:
            JobError: In a worker of a job of several; see `kerasdist.MultiWorkerMirroredStrategy`.
            DeviceError: If a device is unknown, named twice, or there is none.
            UnsupportedError: If the backend cannot do `batch_norm`, or `cross_device_ops` is given.
            ValueError: If `batch_norm` or `check` is none of its choices.
        """
        require_no_other_workers("MirroredStrategy")
        if cross_device_ops is not None:
            raise UnsupportedError(
                "Expected cross_device_ops=None: the backend chooses the collectives by itself, "
                f"NCCL between NVIDIA GPUs. Received: cross_device_ops={cross_device_ops!r:.200}. "
                "Leave the argument out."
            )
        options = ReplicaOptions(batch_norm=checked_batch_norm(batch_norm), check=check_mode(check))
        backend = registry.current()
        chosen = chosen_devices(backend, devices)
        super().__init__(backend.replica_set(chosen, options))
        hooks.install()
