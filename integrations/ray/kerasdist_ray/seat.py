"""The actor that holds a worker, on the worker's machine."""

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

from kerasdist.launch import commands
from kerasdist.launch.attempt import OUTPUT_SECONDS
from kerasdist.launch.output import Screen
from kerasdist.launch.placement import Seat, free_port
from kerasdist.launch.spec import Ending, JobSpec
from kerasdist.launch.worker import Event, Start, Worker
from kerasdist_ray.process import Answer, read_answer, write_call


@final
@dataclass(frozen=True)
class Node:
    """A machine of the cluster.

    Attributes:
        number: Ray's number of it.
        address: Where others reach it.
        port: A free port.
    """

    number: str
    address: str
    port: int


@final
class SeatActor:
    """Holds a worker, which is a process of its own, as ``kerasdist run`` does.

    So the function begins with no framework imported, and in a main thread, and its exit code says
    how it has ended. A Ray actor's own process has neither.
    """

    def __init__(self) -> None:
        self._begun = threading.Event()
        self._worker: Worker

    def node(self) -> Node:
        """Returns the machine that this actor is on."""
        number = ray.get_runtime_context().get_node_id()
        return Node(number, ray.util.get_node_ip_address(), free_port())

    def run(
        self, seat: Seat, name: str, variables: Mapping[str, str], grace: float, call: bytes
    ) -> tuple[Ending, Answer]:
        """Runs the worker to its end.

        Args:
            seat: Which worker it is.
            name: What it is called in front of its lines.
            variables: What its environment has beyond this actor's.
            grace: How many seconds it has from SIGTERM to SIGKILL.
            call: The pickle of what it does.
        """
        with tempfile.TemporaryDirectory(prefix="kerasdist-") as name_of_folder:
            folder = Path(name_of_folder)
            write_call(folder, call)
            command = (sys.executable, "-m", "kerasdist_ray", name_of_folder)
            # What can be imported here, where Ray has seen to that, can be imported there.
            paths = [variables.get("PYTHONPATH", ""), *sys.path]
            start = Start(
                rank=seat.rank,
                name=name,
                command=commands.here(JobSpec(command, stop_seconds=grace), seat),
                variables={**variables, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
                directory=None,
                log=None,
            )
            events: queue.SimpleQueue[Event] = queue.SimpleQueue()
            self._worker = Worker(start, Screen(), events)
            self._begun.set()
            events.get()  # its end
            ending = self._worker.ending(time.monotonic() + OUTPUT_SECONDS)
            return ending, read_answer(folder)

    def stop(self, number: int) -> None:
        """Passes a signal on to the worker.

        Args:
            number: The signal.
        """
        self._begun.wait()
        self._worker.stop(number)

    def kill(self) -> None:
        """Ends the worker at once."""
        self._begun.wait()
        self._worker.kill()
