"""One replica on every device of this machine, with equal variables on each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final, get_args

from kerasdist import config
from kerasdist.backends import registry
from kerasdist.backends.base import Backend, BatchNorm, ReplicaOptions
from kerasdist.devices import Device, check_available, parse_devices
from kerasdist.strategy import Strategy
from kerasdist.training import hooks


@final
class MirroredStrategy(Strategy):
    """Synchronous training on several devices of one machine.

    Each device holds a replica of the model; every batch is divided among them, and their gradients
    are combined so that the result is that of one device with the whole batch.

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/MirroredStrategy
    """

    def __init__(
        self, devices: Sequence[str] | None = None, *, batch_norm: BatchNorm = "synchronized"
    ) -> None:
        """Makes the strategy.

        Args:
            devices: Names such as ``["gpu:0", "gpu:1"]``. None: all accelerators of this machine,
                or, where there is none, all its CPU devices (see
                `kerasdist.config.set_logical_cpu_devices`). CPU devices that do not exist yet are
                prepared, as long as the backend has not started.
            batch_norm: ``"synchronized"``: BatchNormalization uses the global batch, as on one
                device. ``"per_replica"``: each replica's own rows; the moving statistics are
                averaged. Faster, but not the numbers of one device. Not on JAX.

        Raises:
            DeviceError: If a device is unknown, named twice, or there is none.
            UnsupportedError: If the backend cannot do `batch_norm`.
            ValueError: If `batch_norm` is neither of the two.
        """
        if batch_norm not in get_args(BatchNorm):
            raise ValueError(
                f"Expected batch_norm to be one of {list(get_args(BatchNorm))}. "
                f"Received: batch_norm={batch_norm!r}."
            )
        backend = registry.current()
        chosen = _all_devices(backend) if devices is None else _checked(backend, devices)
        super().__init__(backend.replica_set(chosen, ReplicaOptions(batch_norm=batch_norm)))
        hooks.install()


def _all_devices(backend: Backend) -> tuple[Device, ...]:
    config.apply_cpu_devices_variable()
    return backend.accelerators() or backend.devices("cpu")


def _checked(backend: Backend, names: Sequence[str]) -> tuple[Device, ...]:
    config.apply_cpu_devices_variable()
    devices = parse_devices(names)
    cpus = [device.index for device in devices if device.kind == "cpu"]
    if cpus:
        backend.prepare_cpu_devices(max(cpus) + 1)
    for kind in sorted({device.kind for device in devices}):
        check_available([d for d in devices if d.kind == kind], backend.devices(kind))
    return devices
