"""Variables on one device, computation on many."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from kerasdist.api.strategy import Strategy
from kerasdist.backends import registry
from kerasdist.backends.base.interface import BatchNorm, Check
from kerasdist.core.devices import parse_devices
from kerasdist.strategies.arguments import replica_options
from kerasdist.strategies.choice import chosen_devices, require_no_other_workers
from kerasdist.training import hooks


@final
class CentralStorageStrategy(Strategy):
    """Synchronous training on several devices of one machine, with the variables on one.

    For variables that are too large, or too seldom used, to keep a copy on every device: the
    devices read them where they are, and their summed gradients are applied there.

    Example::

        strategy = kd.CentralStorageStrategy(["cpu:0", "cpu:1"])
        with strategy.scope():
            model = build_model()
            model.compile(optimizer="adam", loss="mse")

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/experimental/CentralStorageStrategy
    """

    def __init__(
        self,
        compute_devices: Sequence[str] | None = None,
        parameter_device: str | None = None,
        *,
        batch_norm: BatchNorm | None = None,
        check: Check | None = None,
    ) -> None:
        """Makes the strategy.

        Args:
            compute_devices: Names of the devices that compute; None: as for
                `kerasdist.MirroredStrategy`.
            parameter_device: Name of the device that holds the variables. None: the device that
                computes, if there is one, else ``"cpu:0"``.
            batch_norm: As for `kerasdist.MirroredStrategy`.
            check: As for `kerasdist.MirroredStrategy`.

        Raises:
            JobError: In a worker of a job of several; see `kerasdist.MultiWorkerMirroredStrategy`.
            DeviceError: If a device is unknown, named twice, or there is none.
            UnsupportedError: If the backend cannot do `batch_norm`.
            ValueError: If `batch_norm` or `check` is none of its values.
        """
        require_no_other_workers("CentralStorageStrategy")
        backend = registry.current()
        needed = ["cpu:0"] if parameter_device is None else [parameter_device]
        devices = chosen_devices(backend, compute_devices, needed)
        home = parse_devices(needed)[0]
        if parameter_device is None and len(devices) == 1:
            home = devices[0]
        options = replica_options(batch_norm=batch_norm, check=check, parameter_device=home)
        super().__init__(backend.replica_set(devices, options))
        hooks.install()
