"""The strategy that fits the machine."""

from __future__ import annotations

from kerasdist.api.strategy import Strategy
from kerasdist.backends import registry
from kerasdist.cluster.detection import detect
from kerasdist.strategies import processes
from kerasdist.strategies.choice import chosen_devices
from kerasdist.strategies.mirrored import MirroredStrategy
from kerasdist.strategies.multi_worker import MultiWorkerMirroredStrategy
from kerasdist.strategies.one_device import OneDeviceStrategy


def auto() -> Strategy:
    """Picks a strategy by the environment and by what this machine has.

    Example::

        strategy = kd.auto()  # at the top of the script
        print(strategy)

    Returns:
        `MultiWorkerMirroredStrategy` in a process that is one of several workers, see
        `kerasdist.cluster.detect`. Otherwise `MirroredStrategy` over all accelerators, or all CPU
        devices where there is no accelerator, if there is more than one; else `OneDeviceStrategy`
        on the one there is. `MirroredStrategy` says when it starts a process a device.
    """
    resolver = detect()
    if resolver is not None and not processes.are_started_by_script():
        return MultiWorkerMirroredStrategy(resolver)
    first, *others = chosen_devices(registry.current(), None)
    return MirroredStrategy() if others else OneDeviceStrategy(str(first))
