"""TPU slices and pods: their VMs' metadata from a server of the test, their chips made up."""

import http.server
import threading
from dataclasses import dataclass

import pytest

from kerasdist.backends.jax.mesh import layout
from kerasdist.cluster import cloud_tpu
from kerasdist.cluster.detection import detect
from kerasdist.cluster.source import Absent, Variables
from kerasdist.errors import ClusterError

SLICE = {"agent-worker-number": "2", "worker-network-endpoints": "10.0.0.1,10.0.0.2,10.0.0.3"}
OLD = {**SLICE, "worker-network-endpoints": "a:8470:10.0.0.1,b:8470:10.0.0.2,c:8470:10.0.0.3"}
SLICES = {
    **SLICE,
    "tpu-env": "ACCELERATOR_TYPE: 'v5litepod-16'\nMEGASCALE_NUM_SLICES: '2'\n"
    "MEGASCALE_SLICE_ID: '1'\nMEGASCALE_COORDINATOR_ADDRESS: '10.9.0.1:8080'\nnonsense\n",
}


@pytest.fixture
def tpus(tmp_path, monkeypatch):
    """Gives this machine PCI devices: a network card of Google's and, unless asked not to, TPUs."""

    def attach(device="0x0063"):
        for name, number in {"network": "0x0042", "chip": device}.items():
            folder = tmp_path / name
            folder.mkdir(exist_ok=True)
            (folder / "vendor").write_text("0x1ae0\n")
            (folder / "device").write_text(f"{number}\n")

    monkeypatch.setattr(cloud_tpu, "PCI_DEVICES", tmp_path)
    forget = cloud_tpu.read_attribute.cache_clear
    forget()
    yield attach
    forget()


@pytest.fixture
def metadata():
    """Starts a metadata server; returns the variables with which it is asked."""
    servers = []

    def serve(attributes):
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                name = self.path.rpartition("/")[2]
                known = self.headers["Metadata-Flavor"] == "Google" and name in attributes
                self.send_response(200 if known else 404)
                self.end_headers()
                if known:
                    self.wfile.write(attributes[name].encode())

            def log_message(self, *_):
                pass

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return {"GCE_METADATA_IP": f"127.0.0.1:{server.server_address[1]}"}

    yield serve
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    ("attributes", "rank", "workers", "coordinator"),
    [
        (SLICE, 2, 3, "10.0.0.1:27182"),
        (OLD, 2, 3, "10.0.0.1:27182"),
        (SLICES, 5, 6, "10.9.0.1:27182"),
    ],
    ids=["slice", "old form", "slices"],
)
def test_a_vm_finds_its_place(tpus, metadata, attributes, rank, workers, coordinator):
    tpus()
    place = detect(metadata(attributes)).membership()
    assert (place.rank, place.num_workers, place.coordinator) == (rank, workers, coordinator)
    assert place.source == "Cloud TPU"


def absent(environ):
    answer = cloud_tpu.read(Variables(environ, "Cloud TPU"))
    assert isinstance(answer, Absent), answer
    return answer.reason


def test_other_machines_are_not_asked(tpus, metadata, monkeypatch):
    monkeypatch.setattr(cloud_tpu, "read_attribute", pytest.fail)
    tpus(device="0x001f")  # a disk of Google's
    assert "no TPU is attached" in absent(metadata(SLICE))
    tpus()
    assert "TPU_SKIP_MDS_QUERY" in absent({**metadata(SLICE), "TPU_SKIP_MDS_QUERY": "1"})


def test_no_answer_is_told(tpus, metadata, monkeypatch):
    def refused(host, name):
        raise ConnectionRefusedError("nobody is there")

    tpus()
    monkeypatch.setattr(cloud_tpu, "read_attribute", refused)
    assert "does not answer: nobody is there" in absent(metadata(SLICE))


def test_attributes_of_another_form_are_an_error(tpus, metadata):
    tpus()
    for name, value, said in (
        ("worker-network-endpoints", "x:y", "entry='x:y'"),
        ("agent-worker-number", "two", "TPU_WORKER_ID='two'"),
    ):
        with pytest.raises(ClusterError, match=said):
            detect(metadata({**SLICE, name: value}))


def test_a_vm_of_one_host_or_outside_of_a_slice_is_a_job_of_one(tpus, metadata):
    tpus()
    assert "do not describe a TPU slice" in absent(metadata({}))
    one = {"agent-worker-number": "0", "worker-network-endpoints": "10.0.0.1"}
    assert "one host" in absent(metadata(one))


@dataclass(frozen=True)
class Chip:
    """A device of JAX, as far as meshes look at it."""

    id: int
    coords: tuple[int, int, int]
    core_on_chip: int = 0
    process_index: int = 0
    slice_index: int = 0
    platform: str = "tpu"
    device_kind: str = "TPU v4"


def distance(one, other):
    return sum(abs(a - b) for a, b in zip(one.coords, other.coords, strict=True))


def test_the_logical_devices_of_a_replica_are_neighbours():
    corners = [(0, 0, 0), (1, 1, 0), (0, 1, 0), (1, 0, 0)]  # 0 and 1 are on a diagonal
    chips = [Chip(number, corner) for number, corner in enumerate(corners)]
    grid = layout._grid(chips, (2, 2))
    assert sorted(chip.id for chip in grid.flat) == [0, 1, 2, 3]
    assert [distance(*replica) for replica in grid] == [1, 1]
    # Replicas of one device keep the workers' order, in which a batch is divided.
    assert list(layout._grid(chips, (4,))) == chips
    # So do chips that are no torus.
    chips = [Chip(number, (number, number, 0)) for number in range(4)]
    assert list(layout._grid(chips, (2, 2)).flat) == chips
