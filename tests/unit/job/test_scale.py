"""Jobs of hundreds and thousands of workers on one coordinator.

`make test-everything` takes 4,096 workers. What is asserted are bytes and lines of code that run,
never seconds; the limits on time end a test that hangs.
"""

import asyncio
import contextlib

import pytest

from kerasdist.cli.launch.placement import free_port
from kerasdist.errors import JobError
from kerasdist.job import listening, protocol
from kerasdist.job.coordinator import CHIEF, LEAVING, Coordinator
from tests.environment import everything
from tests.unit.job.simulated_workers import (
    MINE,
    PATIENT,
    CountedLines,
    InMemory,
    SimulatedWorker,
    values_in,
)

MANY = 4096 if everything() else 512
LIMIT_SECONDS = 240.0


@contextlib.asynccontextmanager
async def job_of(workers: int):
    """A coordinator, and workers that come at once."""
    listening.require_file_descriptors(2 * workers)  # both ends are in this process
    port = free_port()
    coordinator = Coordinator("127.0.0.1", port, workers, PATIENT, MINE)
    everyone = [SimulatedWorker(rank, workers, MINE) for rank in range(workers)]
    async with asyncio.timeout(LIMIT_SECONDS):
        await asyncio.gather(*(worker.connect(port) for worker in everyone))
        yield everyone
        for worker in everyone:
            worker.say({"type": "bye", "error": None})
        assert await asyncio.to_thread(coordinator._ended.wait, 60)
    for worker in everyone:
        await worker.close()


async def hear_all(everyone):
    """Returns what each hears next, and how many bytes that is."""
    before = sum(worker.heard for worker in everyone)
    said = await asyncio.gather(*(worker.hear() for worker in everyone))
    return said, sum(worker.heard for worker in everyone) - before


def test_many_workers_join_meet_save_and_leave():
    asyncio.run(asyncio.wait_for(a_whole_job(), LIMIT_SECONDS))


BATCHES = {"stretch": 1, "steps": 9, "begun": 9, "changes": [[0, "32"], [8, "17"]]}


async def a_whole_job():
    async with job_of(MANY) as everyone:
        rosters, size = await hear_all(everyone)
        assert all(one == rosters[0] and one["type"] == "roster" for one in rosters)
        assert size < 200 * MANY  # not the address of each

        facts = "x" * 2048
        for worker in everyone:
            worker.beat(1, "fit", BATCHES)
            worker.meet(1, "a call of fit", facts)
        met, size = await hear_all(everyone)
        assert values_in(met[0]) == [facts] * MANY
        assert all(one == met[0] for one in met)
        assert size < 1.1 * 2048 * MANY

        for worker in everyone:  # one of them differs
            worker.meet(2, "digests", facts[worker.rank == 7 :])
        met, size = await hear_all(everyone)
        assert values_in(met[-1]) == [facts[rank == 7 :] for rank in range(MANY)]
        assert size < 2.1 * 2048 * MANY

        for worker in everyone:  # all differ, and the chief alone needs it
            worker.meet(3, "figures of an epoch", {"ms": worker.rank}, wanted=protocol.FOR_CHIEF)
        met, size = await hear_all(everyone)
        assert values_in(met[CHIEF]) == [{"ms": rank} for rank in range(MANY)]
        assert all(values_in(one) == [] for one in met[1:])
        assert size < 200 * MANY

        for worker in everyone:  # all differ, and all need to know who
            worker.meet(4, "digests", [facts, worker.rank // 2], wanted=protocol.NUMBERS)
        met, size = await hear_all(everyone)
        assert all(values_in(one) == [rank // 2 for rank in range(MANY)] for one in met[::64])
        assert size < 16 * MANY**2

        chief, *others = everyone
        saved = {"path": "/folder/m.keras", "step": 1}
        for worker in others:
            worker.say({"type": "save", "number": 1, **saved, "occurrence": 0, "index": 0})
        chief.say({"type": "wrote", **saved, "outcome": {"modified": 5}})
        answers, _ = await hear_all(others)
        assert all(one["values"] == [{"modified": 5}] for one in answers)

        for worker in everyone[: MANY // 2]:  # half are at the end, and half still evaluate
            worker.beat()
            worker.meet(1, "end of the script", 1, LEAVING)
        for worker in everyone[MANY // 2 :]:
            worker.beat(1, "evaluate")
        await asyncio.sleep(2 * PATIENT.beat)
        for worker in everyone[MANY // 2 :]:
            worker.beat()
            worker.meet(1, "end of the script", 1, LEAVING)
        met, _ = await hear_all(everyone)
        assert {one["type"] for one in met} == {"met"}


@contextlib.contextmanager
def cost_of(job):
    """Counts the lines of kerasdist that run in a block, and the bytes that are sent."""
    cost = [-sum(wire.bytes for wire in job.wires)]
    with CountedLines("/kerasdist/job/") as counted:
        yield cost
    cost[:] = counted.lines, cost[0] + sum(wire.bytes for wire in job.wires)


MESSAGES = {
    "beat": lambda job: job.beat(1, 5),
    "meet": lambda job: job.meet(1, 1),
    "save": lambda job: job.save(1, 2),
    "bye": lambda job: job.hear(1, "bye", error=None),
}


@pytest.mark.parametrize("send", MESSAGES.values(), ids=MESSAGES)
def test_a_message_costs_the_same_in_a_job_of_any_size(send, monkeypatch):
    """The figures are those of the second worker's message, where all others have sent theirs."""
    costs = set()
    for workers in (3, 64, 4096):
        job = InMemory(workers, monkeypatch)
        for rank in range(2, workers):
            job.beat(rank)
            job.meet(rank, 1)
            job.meet(rank, 1, LEAVING)
            job.save(rank, 2)
        with cost_of(job) as cost:
            send(job)
        costs.add(tuple(cost))
    assert len(costs) == 1, costs
    assert min(costs)[0] > 5


@pytest.mark.parametrize("what", ["meeting", "patrol", "files"])
def test_what_concerns_all_passes_over_them_once(what, monkeypatch):
    """Lines and bytes a worker do not grow with the number of workers."""
    costs = {}
    for workers in (1, 64, 4096):
        job = InMemory(workers, monkeypatch)
        for rank in range(workers):
            job.beat(rank, 40)
        for rank in range(1, workers):
            job.save(rank, 40)
        with cost_of(job) as cost:
            if what == "meeting":
                for rank in range(workers):
                    job.meet(rank, 1, value="x" * 64)
            elif what == "patrol":
                for rank in range(workers // 2):
                    job.meet(rank, 1, LEAVING, 40)
                job.patrol()
            else:
                job.hear(CHIEF, "wrote", path="m", step=40, outcome={"modified": 1})
        costs[workers] = cost[0] / workers, cost[1] / workers
    (few_lines, few_bytes), (lines, of_bytes) = costs[64], costs[4096]
    assert lines <= few_lines, costs
    assert of_bytes <= few_bytes + 4, costs  # a number of four digits


def test_too_few_file_descriptors_are_named(monkeypatch):
    resource = pytest.importorskip("resource")
    limits = [(256, 1024)]
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits[-1])

    def raise_limit(which, wanted):
        if wanted[0] > wanted[1]:
            raise ValueError("current limit exceeds maximum limit")
        limits.append(wanted)

    monkeypatch.setattr(resource, "setrlimit", raise_limit)
    with pytest.raises(JobError, match=r"4608 open files.*4096 workers.*limit of 1024"):
        Coordinator("127.0.0.1", 0, 4096, PATIENT, MINE)
    assert limits[-1] == (1024, 1024)
    listening.require_file_descriptors(500)
    limits.append((256, 4096))
    listening.require_file_descriptors(500)
    assert limits[-1] == (2512, 4096)  # the soft limit is raised
    listening.require_file_descriptors(500)
    assert len(limits) == 4  # once
