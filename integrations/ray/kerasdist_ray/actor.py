"""The actor that runs a worker, on the worker's machine."""

from __future__ import annotations

import os
import queue
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import final

import ray

from kerasdist.cli.launch import start
from kerasdist.cli.launch.job import OUTPUT_SECONDS
from kerasdist.cli.launch.placement import Slot, free_port
from kerasdist.cli.launch.spec import JobSpec, WorkerExit
from kerasdist.cli.launch.worker import Event, Screen, Start, Worker
from kerasdist_ray.process import Answer, read_answer, write_call


@final
@dataclass(frozen=True)
class Node:
    """A machine of the cluster.

    Attributes:
        number: Ray's number of it.
        address: The address at which other machines reach it.
        port: A free port.
    """

    number: str
    address: str
    port: int


@final
class WorkerActor:
    """Runs a worker as a process of its own, as ``kerasdist run`` does.

    So the function begins in a main thread with no framework imported, and the exit code tells how
    it ended. A Ray actor's own process has neither.
    """

    def __init__(self) -> None:
        self._begun = threading.Event()
        self._worker: Worker

    def node(self) -> Node:
        """Returns the machine that this actor is on."""
        number = ray.get_runtime_context().get_node_id()
        return Node(number, ray.util.get_node_ip_address(), free_port())

    def run(
        self, slot: Slot, name: str, variables: Mapping[str, str], grace: float, call: bytes
    ) -> tuple[WorkerExit, Answer]:
        """Runs the worker to its end; ``call`` is the pickle of its function and the arguments.

        ``name`` stands before each line of its output, ``grace`` is its time from SIGTERM to
        SIGKILL.
        """
        with tempfile.TemporaryDirectory(prefix="kerasdist-") as name_of_folder:
            folder = Path(name_of_folder)
            write_call(folder, call)
            command = (sys.executable, "-m", "kerasdist_ray", name_of_folder)
            # Ray has made the modules importable here; the worker gets the same paths.
            paths = [variables.get("PYTHONPATH", ""), *sys.path]
            own = {**variables, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
            orders = start.orders_of(JobSpec(command, stop_seconds=grace), slot, own)
            begun = Start(slot.rank, name, start.SUPERVISOR_HERE, orders)
            events: queue.SimpleQueue[Event] = queue.SimpleQueue()
            self._worker = Worker(begun, Screen(), events)
            self._begun.set()
            events.get()  # the worker has ended
            ending = self._worker.ending(time.monotonic() + OUTPUT_SECONDS)
            return ending, read_answer(folder)

    def stop(self, number: int) -> None:
        """Passes a signal on to the worker."""
        self._begun.wait()
        self._worker.stop(number)

    def kill(self) -> None:
        """Ends the worker at once."""
        self._begun.wait()
        self._worker.kill()
