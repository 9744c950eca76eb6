"""Everything on one device, chosen by name."""

from __future__ import annotations

from typing import final

from kerasdist.api.strategy import Strategy
from kerasdist.backends import registry
from kerasdist.backends.base.options import ReplicaOptions
from kerasdist.core.devices import parse_devices
from kerasdist.strategies.choice import require_available, require_no_other_workers
from kerasdist.training import hooks


@final
class OneDeviceStrategy(Strategy):
    """Places variables and computation on a single device.

    For trying out code that will later run under another strategy, and for choosing a device.

    Example::

        strategy = kd.OneDeviceStrategy("cpu:1")
        with strategy.scope():
            model = build_model()

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/OneDeviceStrategy
    """

    def __init__(self, device: str) -> None:
        """Makes the strategy.

        Args:
            device: The device's name, ``"cpu:0"`` or ``"gpu:1"``; TensorFlow's spellings are
                accepted.

        Raises:
            JobError: In a worker of a job of several; see `kerasdist.MultiWorkerMirroredStrategy`.
            DeviceError: If this machine has no such device.
        """
        require_no_other_workers("OneDeviceStrategy")
        backend = registry.current()
        devices = parse_devices([device])
        require_available(backend, devices)
        super().__init__(backend.replica_set(devices, ReplicaOptions()))
        hooks.install()
