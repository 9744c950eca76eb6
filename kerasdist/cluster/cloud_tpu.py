"""Reads the cluster of a Cloud TPU: one or several slices of hosts, with one process per host."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from kerasdist.cluster import addresses
from kerasdist.cluster.source import Absent, Membership, Source, Variables
from kerasdist.errors import ClusterError

PCI_DEVICES = Path("/sys/bus/pci/devices")

# The PCI ids of Google and of its TPUs from v2 to v7, as in jax/_src/hardware_utils.py of JAX 0.10.
_GOOGLE = "0x1ae0"
_TPUS = {"0x0027", "0x0056", "0x005e", "0x0062", "0x0063", "0x006f", "0x0076"}

DEFAULT_HOST = "metadata.google.internal"
_PATH = "computeMetadata/v1/instance/attributes"
_SECONDS, _TRIES, _PAUSE = 5.0, 3, 0.5

# Attributes in a TPU VM's metadata, which describe its slice. They are not read if the environment
# variable `_NO_METADATA` is set.
_ATTRIBUTES = ("agent-worker-number", "worker-network-endpoints", "tpu-env")
_NO_METADATA = "TPU_SKIP_MDS_QUERY"


def read(variables: Variables) -> Membership | Absent:
    """Reads the variables that GKE sets on TPU hosts; on other TPU hosts, the VM's metadata."""
    if variables.has("TPU_WORKER_ID", "TPU_WORKER_HOSTNAMES"):
        hosts = [host.strip() for host in variables.text("TPU_WORKER_HOSTNAMES").split(",")]
        return _membership(variables, hosts, variables.integer("TPU_WORKER_ID"))
    missing = "TPU_WORKER_ID and TPU_WORKER_HOSTNAMES are not both set"
    if variables.has(_NO_METADATA):
        return Absent(f"{missing}, and {_NO_METADATA} is set.")
    if not has_tpus():
        return Absent(f"{missing}, and no TPU is attached to this machine.")
    host = variables.optional_text("GCE_METADATA_IP") or DEFAULT_HOST
    try:
        told = {name: read_attribute(host, name) for name in _ATTRIBUTES}
    except OSError as error:
        return Absent(f"{missing}, and the metadata server {host} does not answer: {error}.")
    number, endpoints, settings = told.values()
    if number is None or endpoints is None:
        return Absent(f"{missing}, and the VM's metadata do not describe a TPU slice.")
    own = {"TPU_WORKER_ID": number, **dict(_settings_of(settings or "")), **variables.all}
    slices = Variables(own, SOURCE.name)
    hosts = [_host_of(one) for one in endpoints.split(",")]
    return _membership(slices, hosts, slices.integer("TPU_WORKER_ID"))


def _membership(variables: Variables, hosts: list[str], worker: int) -> Membership | Absent:
    """Returns the membership of a worker; `hosts` are the hosts of the worker's own slice."""
    slices = variables.optional_integer("MEGASCALE_NUM_SLICES") or 1
    count = len(hosts) * slices
    if count == 1:
        return Absent("This TPU slice has one host.")
    index = variables.optional_integer("MEGASCALE_SLICE_ID") or 0
    rank = index * len(hosts) + worker
    # `first` is the host of rank 0. With several slices, libtpu's own coordinator is on this host.
    first = hosts[0]
    if slices > 1:
        first = variables.text("MEGASCALE_COORDINATOR_ADDRESS").partition(":")[0]
    return variables.worker(
        rank, count, addresses.join(first, addresses.DEFAULT_PORT), local=(0, 1)
    )


def _host_of(endpoint: str) -> str:
    """Returns the host in an entry of ``worker-network-endpoints``: a host, or name:number:host."""
    parts = endpoint.strip().split(":")
    if not parts[-1] or len(parts) not in (1, 3):
        raise ClusterError(
            "Expected the entries of the TPU VM's metadata worker-network-endpoints to be hosts, "
            f"or name:number:host. Received: entry={endpoint!r}. Set KERASDIST_WORKERS and "
            "KERASDIST_RANK by hand."
        )
    return parts[-1]


def _settings_of(lines: str) -> Iterator[tuple[str, str]]:
    """Yields the cluster's settings in the attribute ``tpu-env``, from lines ``NAME: 'value'``."""
    for line in lines.splitlines():
        name, colon, value = line.partition(":")
        if colon and name.strip() in SOURCE.others:
            yield name.strip(), value.strip().strip("'\"")


def has_tpus() -> bool:
    """Returns whether TPUs are attached to this machine, without starting a framework."""
    return any(
        _text(device / "vendor") == _GOOGLE and _text(device / "device") in _TPUS
        for device in PCI_DEVICES.glob("*")
    )


@cache
def read_attribute(host: str, name: str) -> str | None:
    """Returns an attribute of this VM; None if the VM has no attribute of this name.

    Args:
        host: The host of the metadata server.
        name: The name of the attribute.

    Raises:
        OSError: If the server does not answer.
    """
    import http.client  # slow to import, and needed only on TPU hosts

    for left in reversed(range(_TRIES)):
        # `HTTPConnection` uses no proxy. That is right, because the server is on this machine.
        connection = http.client.HTTPConnection(host, timeout=_SECONDS)
        try:
            connection.request("GET", f"/{_PATH}/{name}", headers={"Metadata-Flavor": "Google"})
            answer = connection.getresponse()
            if answer.status in (200, 404):
                return answer.read().decode() if answer.status == 200 else None
            raise OSError(f"HTTP status {answer.status}, {answer.reason}")
        except OSError:
            if not left:
                raise
        finally:
            connection.close()
        time.sleep(_PAUSE)
    raise AssertionError("The loop returns or raises.")


def _text(file: Path) -> str:
    try:
        return file.read_text("utf-8").strip()
    except OSError:
        return ""


SOURCE = Source(
    name="Cloud TPU",
    needed=(),
    others=(
        "TPU_WORKER_ID",
        "TPU_WORKER_HOSTNAMES",
        "MEGASCALE_NUM_SLICES",
        "MEGASCALE_SLICE_ID",
        "MEGASCALE_COORDINATOR_ADDRESS",
    ),
    read=read,
    is_of_place=True,
)
