"""What the metadata server of a Cloud TPU VM tells of the slice that the VM is part of."""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from functools import cache
from http import HTTPStatus
from pathlib import Path

PCI_DEVICES = Path("/sys/bus/pci/devices")

# The PCI numbers of Google and of its TPUs, v2 to v7, as in jax/_src/hardware_utils.py of JAX 0.10.
_GOOGLE = "0x1ae0"
_TPUS = {"0x0027", "0x0056", "0x005e", "0x0062", "0x0063", "0x006f", "0x0076"}

DEFAULT_HOST = "metadata.google.internal"
_PATH = "computeMetadata/v1/instance/attributes"
_SECONDS, _TRIES, _PAUSE = 5.0, 3, 0.5


def has_tpus() -> bool:
    """Returns whether TPUs are attached to this machine, without starting a framework."""
    return any(
        _text(device / "vendor") == _GOOGLE and _text(device / "device") in _TPUS
        for device in PCI_DEVICES.glob("*")
    )


@cache
def attribute(host: str, name: str) -> str | None:
    """Returns an attribute of this VM, None if it has none of this name.

    Args:
        host: The metadata server.
        name: The attribute.

    Raises:
        OSError: If the server does not answer.
    """
    headers = {"Metadata-Flavor": "Google"}
    request = urllib.request.Request(f"http://{host}/{_PATH}/{name}", headers=headers)
    # The server is on this machine, so no proxy of the environment reaches it.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    for left in reversed(range(_TRIES)):
        try:
            with opener.open(request, timeout=_SECONDS) as answer:
                return answer.read().decode()
        except urllib.error.HTTPError as error:
            error.close()
            if error.code == HTTPStatus.NOT_FOUND:
                return None
            if not left:
                raise
        except OSError:
            if not left:
                raise
        time.sleep(_PAUSE)
    raise AssertionError("The loop returns or raises.")


def _text(file: Path) -> str:
    try:
        return file.read_text("utf-8").strip()
    except OSError:
        return ""
