"""One start of a job on Ray: the workers' machines, and the driver's side of each worker."""

from __future__ import annotations

import os
import queue
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, final

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from kerasdist.cli.launch import start
from kerasdist.cli.launch.job import Attempt
from kerasdist.cli.launch.placement import Slot
from kerasdist.cli.launch.spec import AttemptResult, JobSpec, WorkerExit
from kerasdist.cli.launch.worker import Event, Exited
from kerasdist.cluster import addresses
from kerasdist.errors import JobError
from kerasdist_ray.actor import Node, WorkerActor
from kerasdist_ray.process import Answer

# Ray takes a while to notice that a machine is gone, and to look for another.
_SECONDS_TO_NEXT_TRY = 1.0

# An actor gets `stop` while its `run` waits for the worker.
_CALLS_AT_ONCE = 4


def run_once(
    spec: JobSpec, number: int, group: PlacementGroup, call: Any, seconds: float
) -> tuple[AttemptResult, list[Answer]]:
    """Starts a job, and returns how it ended and what each worker's function returned.

    ``number`` counts the starts before, ``group`` has a bundle of resources for each worker,
    ``call`` is Ray's reference to the pickled call, and ``seconds`` is Ray's time to start the
    actors.
    """
    actors, nodes = _by_machine(*_actors(group, seconds))
    held: list[_Held] = []
    try:
        # A worker with GPUs of its own sees no others, and must not divide them again.
        slots = _slots(nodes, own_devices="GPU" in group.bundle_specs[0])
        coordinator = _meeting_point(nodes)
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        of_job = start.job_variables(spec, number)

        def begin() -> Iterator[_Held]:
            for slot, actor in zip(slots, actors, strict=True):
                variables = {
                    **start.for_another_machine(os.environ),
                    **start.worker_variables(spec, slot, len(slots), coordinator, number),
                    **of_job,
                }
                name = f"worker {slot.rank}/{len(slots)}"
                ending = actor.run.remote(slot, name, variables, spec.stop_seconds, call)
                held.append(_Held(slot.rank, actor, ending, events))
                yield held[-1]

        result = Attempt(begin(), events, spec.stop_seconds).run()
        return result, [worker.answer for worker in held]
    finally:
        _end(actors)


def _actors(group: PlacementGroup, seconds: float) -> tuple[list[Any], list[Node]]:
    """Starts the actors, and returns them with their machines."""
    deadline = time.monotonic() + seconds
    while True:
        actors = [_actor(group, index) for index in range(group.bundle_count)]
        left = max(0.0, deadline - time.monotonic())
        try:
            return actors, ray.get([actor.node.remote() for actor in actors], timeout=left)
        except (RayActorError, GetTimeoutError) as error:
            _end(actors)
            if time.monotonic() + _SECONDS_TO_NEXT_TRY > deadline:
                raise JobError(
                    f"Expected Ray to start {len(actors)} actors within {seconds:g} s. Received: "
                    f"{type(error).__name__}: {error}. Raise placement_seconds if the cluster "
                    "needs more to replace a machine; Ray's own logs say why an actor ended."
                ) from error
        time.sleep(_SECONDS_TO_NEXT_TRY)


def _end(actors: Sequence[Any]) -> None:
    # The supervisor ends a worker whose actor is gone.
    for actor in actors:
        ray.kill(actor)


def _actor(group: PlacementGroup, index: int) -> Any:
    bundle = group.bundle_specs[index]
    named = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
    options: dict[str, Any] = {"num_cpus": 0}
    options |= {named[name]: amount for name, amount in bundle.items() if name in named}
    options["resources"] = {name: amount for name, amount in bundle.items() if name not in named}
    place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
    actor_class = ray.remote(WorkerActor)
    return actor_class.options(
        **options, max_concurrency=_CALLS_AT_ONCE, scheduling_strategy=place
    ).remote()


def _by_machine(actors: Sequence[Any], nodes: Sequence[Node]) -> tuple[list[Any], list[Node]]:
    """Orders the actors such that the ranks of a machine follow each other."""
    machines = list(dict.fromkeys(node.number for node in nodes))
    order = sorted(range(len(nodes)), key=lambda index: machines.index(nodes[index].number))
    return [actors[index] for index in order], [nodes[index] for index in order]


def _slots(nodes: Sequence[Node], *, own_devices: bool) -> list[Slot]:
    slots: list[Slot] = []
    for rank, node in enumerate(nodes):
        mates = [other for other, each in enumerate(nodes) if each.number == node.number]
        place = (0, 1) if own_devices else (mates.index(rank), len(mates))
        slots.append(Slot(node.address, rank, *place))
    return slots


def _meeting_point(nodes: Sequence[Node]) -> str:
    alone = len({node.number for node in nodes}) == 1
    return addresses.join("127.0.0.1" if alone else nodes[0].address, nodes[0].port)


@final
class _Held:
    """The driver's side of a worker; see `kerasdist.cli.launch.worker.Held`."""

    def __init__(
        self, rank: int, actor: Any, ending: Any, events: queue.SimpleQueue[Event]
    ) -> None:
        self.rank = rank
        self.answer = Answer()
        self._actor = actor
        self._stopped = self._killed = False
        self._began = time.monotonic()
        self._over = threading.Event()
        self._ending: WorkerExit
        threading.Thread(target=self._wait, args=(ending, events), daemon=True).start()

    @property
    def running(self) -> bool:
        """Whether the worker has not ended yet."""
        return not self._over.is_set()

    @property
    def exit_code(self) -> int:
        """The worker's exit code, once it has ended."""
        self._over.wait()
        return self._ending.exit_code

    def stop(self, number: int) -> None:
        """Passes a signal on to the worker."""
        self._stopped = True
        self._actor.stop.remote(number)

    def kill(self) -> None:
        """Ends the worker at once."""
        self._stopped = self._killed = True
        self._actor.kill.remote()

    def kill_supervisor(self) -> None:
        """Ends the actor, and the worker with it."""
        ray.kill(self._actor)

    def ending(self, deadline: float) -> WorkerExit:
        """Returns how it has ended; the actor has waited for its output."""
        del deadline
        return self._ending

    def _wait(self, ending: Any, events: queue.SimpleQueue[Event]) -> None:
        try:
            self._ending, self.answer = ray.get(ending)
        except RayError as error:
            self._ending = self._without_actor(error)
        self._over.set()
        events.put(Exited(self.rank))

    def _without_actor(self, error: RayError) -> WorkerExit:
        """Returns how a worker ended whose actor is gone, for example with its machine."""
        return WorkerExit(
            rank=self.rank,
            exit_code=128 + signal.SIGKILL if isinstance(error, RayActorError) else 1,
            seconds=time.monotonic() - self._began,
            stopped=self._stopped,
            killed=self._killed,
            last_lines=tuple(str(error).splitlines()),
        )
