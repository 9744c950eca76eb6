"""A worker of a job on one machine whose ports a stranger wants, and that says where it listens."""

import subprocess
import sys
from pathlib import Path

import keras
import numpy as np

import kerasdist as kd
from kerasdist.backends import registry

# A process that takes every port it is told of, as soon as it can.
GRABBER = """
import socket, sys
for port in map(int, sys.argv[1:]):
    try:
        socket.create_server(("", port))
        print("grabbed", port)
    except OSError:
        pass
"""


def connect_among_grabbers(job, gpus=None):
    """Lets another process try the job's ports between their choice and their use."""
    ports = [address.rpartition(":")[2] for address in job.gather_addresses()]
    ports.append(job.membership.coordinator.rpartition(":")[2])
    grabbed = subprocess.run(
        [sys.executable, "-c", GRABBER, *ports], capture_output=True, text=True, check=True
    ).stdout
    print(grabbed or "grabbed none", flush=True)
    return connect(job, gpus)


def listening() -> set[str]:
    """The addresses where this process listens, as Linux writes them."""
    own = {str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()}
    rows = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/self/net/{name}").read_text("utf-8").splitlines()[1:]
    ]
    listens = "0A"
    return {
        row[1].partition(":")[0]
        for row in rows
        if row[3] == listens and f"socket:[{row[9]}]" in own
    }


connect = registry.current().connect
registry.current().__class__.connect = lambda _, *given: connect_among_grabbers(*given)
strategy = kd.MultiWorkerMirroredStrategy(devices=["cpu:0"])
with strategy.scope():
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
model.fit(np.ones((8, 2)), np.ones((8, 1)), batch_size=4, verbose=0)
print("listens on", *sorted(listening()), flush=True)
