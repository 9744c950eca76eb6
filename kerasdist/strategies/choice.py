"""Which devices a strategy takes: all of the machine's, or those that are named."""

from __future__ import annotations

from collections.abc import Sequence

from kerasdist import config
from kerasdist.backends.base import Backend
from kerasdist.devices import Device, check_available, parse_devices


def chosen_devices(
    backend: Backend, names: Sequence[str] | None, needed: Sequence[str] = ()
) -> tuple[Device, ...]:
    """Returns a strategy's devices.

    Args:
        backend: The backend in use.
        names: Their names. None: all accelerators of this machine, or, where there is none, all its
            CPU devices. CPU devices that do not exist yet are prepared, as long as the backend has
            not started.
        needed: Names of devices that must be there too. To ask for devices starts a backend, so CPU
            devices are prepared for all names at once.

    Raises:
        DeviceError: If a device is unknown, named twice, or there is none.
    """
    wanted = prepare(backend, names, needed)
    for kind in sorted({device.kind for device in wanted}):
        check_available([d for d in wanted if d.kind == kind], backend.devices(kind))
    if names is None:
        return backend.accelerators() or backend.devices("cpu")
    return parse_devices(names)


def prepare(
    backend: Backend, names: Sequence[str] | None, needed: Sequence[str] = ()
) -> list[Device]:
    """Prepares the CPU devices among those that are named, without starting the backend.

    Args:
        backend: The backend in use.
        names: What `chosen_devices` takes.
        needed: Likewise.

    Returns:
        All that are named, once each.

    Raises:
        DeviceError: If a name cannot be read, or the backend has started with fewer devices.
    """
    config.apply_cpu_devices_variable()
    named = () if names is None else parse_devices(names)
    wanted = list(dict.fromkeys([*named, *(parse_devices([name])[0] for name in needed)]))
    cpus = [device.index for device in wanted if device.kind == "cpu"]
    if cpus:
        backend.prepare_cpu_devices(max(cpus) + 1)
    return wanted
