"""One rank of a job of thousands, alone in its process.

The other ranks are simulated: to the job's coordinator, which is a real one, they say what this
rank says; and torch's fake process group returns from each collective at once.
"""

import contextlib
import itertools
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import kerasdist as kd
from kerasdist import keras_compat
from kerasdist.backends.torch.workers import buckets, process_group
from kerasdist.callbacks.backup import variables
from kerasdist.cluster.source import Membership
from kerasdist.job import job as jobs
from kerasdist.job import protocol
from kerasdist.job.interruption import DroppedInterrupts
from kerasdist.job.job import Job
from tests.environment import everything
from tests.unit.job.simulated_workers import PATIENT, CountedLines, InMemory, Wire, values_in

PACKAGE = str(Path(kd.__file__).parent)


class Heard(Wire):
    def write(self, data: bytes):
        self.last = json.loads(data[protocol.HEADER_BYTES :])


class Spokesman:
    """The connection of one rank, which speaks for all: they agree."""

    failure, closed, place = None, False, ""
    step = entered = 0

    def __init__(self, place: Membership, patch: pytest.MonkeyPatch):
        self._rank, self._ranks = place.rank, range(place.num_workers)
        self._job = InMemory(place.num_workers, patch)
        self._wire = self._job.members[place.rank].writer = Heard()

    def meet(self, channel: str, number: int, label: str, value: Any, wanted: str = protocol.ALL):
        value = json.loads(json.dumps(value))
        met = {"channel": channel, "number": number, "label": label, "value": value}
        for rank in self._ranks:
            self._job.hear(rank, "meet", **met, wanted=wanted)
        return values_in(self._wire.last)

    def meets_here(self, wants: bool) -> bool:
        return wants


def job_of(place: Membership, patch: pytest.MonkeyPatch) -> Job:
    """Returns the job as seen by a rank that has joined it."""
    job = object.__new__(Job)
    job.membership, job.timeouts = place, PATIENT
    job.rank, job.num_workers, job.is_chief = place.rank, place.num_workers, place.is_chief
    job._client, job._coordinator, job._port = Spokesman(place, patch), None, None
    job._addresses, job._numbers = (), defaultdict(itertools.count)
    job._at_leave, job._failing_exit = [], None
    job._interrupts, job.collectives = DroppedInterrupts(lambda: False), None
    job.address = job.chief_address = "127.0.0.1:1"
    job.is_on_one_machine = True
    return job


class Resolver(kd.cluster.ClusterResolver):
    def __init__(self, place: Membership):
        self._place = place

    def membership(self) -> Membership:
        return self._place


@contextlib.contextmanager
def strategy_of(rank: int, ranks: int, **options: Any) -> Iterator[kd.Strategy]:
    """The strategy of one rank, which has joined and is connected."""
    place = Membership("worker", rank, rank, ranks, (), "127.0.0.1:1", "a test")
    with pytest.MonkeyPatch.context() as patch:
        job = job_of(place, patch)
        patch.setattr(jobs, "_current", [job])
        patch.setattr(process_group, "_backend", lambda: "fake")
        patch.setattr(buckets, "_POLLING", 0.0)  # no work of a fake group says that it is done
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
        try:
            yield kd.MultiWorkerMirroredStrategy(Resolver(place), devices=["cpu:0"], **options)
        finally:
            dist.destroy_process_group()


class Recorded(TorchDispatchMode):
    """The collectives that start in a block: their names, and the sizes of their tensors."""

    def __init__(self):
        super().__init__()
        self.started: list[tuple[str, list[int]]] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "c10d":
            tensors = [one for one in tree_leaves(args) if isinstance(one, torch.Tensor)]
            self.started.append((function.__name__, [one.numel() for one in tensors]))
        return function(*args, **(kwargs or {}))


def model() -> keras.Model:
    hidden = [keras.layers.Dense(96, "relu"), keras.layers.Dropout(0.5)]
    outputs = [keras.layers.Dense(96, "relu"), keras.layers.Dense(1)]
    made = keras.Sequential([keras.Input((64,)), *hidden, *outputs])
    made.compile("adam", "mse", metrics=["mae"])
    return made


def facts(rank: int, ranks: int, state: str | None) -> dict[str, Any]:
    """What one rank does in steps of `fit`, and what it holds."""
    sharding = None if state is None else kd.Sharding(state, min_size=64)
    options = {"sharding": sharding, "check": "off"}
    options["communication_options"] = kd.CommunicationOptions(bytes_per_pack=2**14)
    examples = 2 * ranks + 1
    x = np.zeros((4 * examples, 64), "float32")

    def fit(steps: int) -> None:
        # Always of all rows, of which `fit` takes a checksum in blocks when it begins.
        options = {"shuffle": False, "verbose": 0, "steps_per_epoch": steps}
        net.fit(x, x[:, :1], batch_size=examples, **options)

    with strategy_of(rank, ranks, **options) as strategy:
        with strategy.scope():
            net = model()
        fit(2)  # from the second step on, the buckets and groups of weights are known
        with Recorded() as recorded:
            fit(2)
        lines: list[int] = []
        for steps in (1, 4):
            with CountedLines(PACKAGE) as counted:
                fit(steps)
            lines.append(counted.lines)
        known = variables.variables_of(net)
        held = variables.shards_of(known, strategy.replica_set)
        return {
            "collectives": recorded.started,
            "lines of 3 steps": lines[1] - lines[0],
            "bytes": sum(keras_compat.stored_value(one).nbytes for one in known),
            "shapes": [list(one.shape) for one in known],
            "itemsizes": [keras_compat.stored_value(one).element_size() for one in known],
            "shards": {n: [[one.region.begin, one.region.end] for one in held[n]] for n in held},
        }


def main(ranks: int, states: Iterable[str]):
    for state in states:
        for rank in (0, *[ranks // 2] * everything(), ranks - 1):
            found = facts(rank, ranks, None if state == "replicated" else state)
            print(json.dumps({"state": state, "rank": rank, **found}), flush=True)
