"""Which slots a job of a changing size has: what counts as lost, and what comes back."""

import queue
import types

import pytest

from kerasdist.cli.launch import start
from kerasdist.cli.launch.elastic import joining, slots
from kerasdist.cli.launch.elastic.slots import Slots
from kerasdist.cli.launch.placement import Slot
from kerasdist.cli.launch.spec import AttemptResult, JobSpec, WorkerExit
from kerasdist.cli.launch.worker import Screen, Waiting
from kerasdist.errors import ClusterError
from kerasdist.job.interruption import ExitCode

LOST = ExitCode.LOST_WORKER
COMMAND = ("python", "train.py")


class Job:
    def __init__(self, monkeypatch, **spec):
        self.down, self.now, self.asked = set(), 0.0, []
        monkeypatch.setattr(slots, "time", types.SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(Slots, "_ask", lambda _, hosts: set(filter(self._answers, hosts)))
        monkeypatch.setattr(Slots, "_pause", lambda _: self._pass(100.0))
        self.events = queue.SimpleQueue()
        self.slots = Slots(JobSpec(COMMAND, **spec), self.events, Screen())
        self.attempt = -1

    def _answers(self, host):
        self.asked.append(host)
        return host not in self.down

    def _pass(self, seconds):
        self.now += seconds

    def choose(self):
        self.attempt += 1
        return [(slot.host, slot.local_rank, slot.local_workers) for slot in self.slots.choose()]

    def end(self, *codes, stopped=(), killed=()):
        endings = (
            WorkerExit(rank, code, 1.0, rank in stopped, rank in killed, ())
            for rank, code in enumerate(codes)
        )
        self.slots.learn(AttemptResult(tuple(endings), None))

    def back_up(self, epoch=1, batches=4):
        self.slots.heard_of_backup(self.attempt, epoch, batches, 9)
        while self.slots._asking.locked():  # until the hosts have been asked
            pass

    def waiting(self):
        return [] if self.events.empty() else [self.events.get()]


HERE = [(None, rank, 3) for rank in range(3)]


def test_a_process_that_ended_is_started_again(monkeypatch):
    job = Job(monkeypatch, workers=3, min_workers=1)
    assert job.choose() == HERE
    for rank in (1, 2):  # not the same one twice
        job.end(*(137 if one == rank else LOST for one in range(3)))
        assert job.choose() == HERE
    job.back_up()
    job.end(LOST, 137, LOST)  # a backup was between
    assert job.choose() == HERE
    assert job.slots.describe() == "the job goes on with 3 of 3 workers from epoch 2, step 5"


def test_a_slot_that_fails_again_is_left_out_and_tried_again_later(monkeypatch):
    job = Job(monkeypatch, workers=3, min_workers=2)
    for _ in range(2):
        assert job.choose() == HERE
        job.end(LOST, 1, 143, stopped=[2])
    left = job.slots.choose()
    assert left == (Slot(None, 0, 0, 2, share=(0, 3)), Slot(None, 1, 1, 2, share=(2, 3)))
    assert job.slots.describe().endswith("left out since they failed again: this machine:1")
    job.back_up()
    assert job.waiting() == []
    job.now = slots.AWAY_SECONDS
    job.back_up()
    assert job.waiting() == [Waiting(job.attempt)]
    assert job.choose() == HERE
    job.end(LOST, 1, LOST)
    assert len(job.choose()) == 2
    job.now = 2 * slots.AWAY_SECONDS  # it is left out for twice as long
    assert len(job.choose()) == 2
    job.now = 3 * slots.AWAY_SECONDS
    assert job.choose() == HERE


@pytest.mark.parametrize(("least", "codes"), [(1, (1, 1)), (2, (LOST, 1))])
def test_no_slot_is_left_out(monkeypatch, least, codes):
    """What all fail with is no slot's fault, and a slot that is needed is used again."""
    job = Job(monkeypatch, workers=2, min_workers=least)
    for _ in range(4):
        assert len(job.choose()) == 2
        job.end(*codes)


def test_a_worker_that_hangs_is_to_blame(monkeypatch):
    job = Job(monkeypatch, workers=2, min_workers=1)
    for _ in range(2):
        assert len(job.choose()) == 2
        job.end(LOST, 137, stopped=[1], killed=[1])
    assert job.slots.choose() == (Slot(None, 0, 0, 1, share=(0, 2)),)


def test_a_host_that_answers_is_not_lost(monkeypatch):
    """255 may have been the script's, or a connection that broke."""
    job = Job(monkeypatch, workers=2, min_workers=1, hosts=["a,b"])
    assert len(job.choose()) == 2
    job.end(LOST, 255)
    assert [host for host, *_ in job.choose()] == ["a", "b"]


def test_hosts_to_spare(monkeypatch):
    job = Job(monkeypatch, workers=2, min_workers=1, hosts=["a,b,c"])
    assert [host for host, *_ in job.choose()] == ["a", "b"]
    job.down = {"a"}
    job.end(255, LOST)
    assert [host for host, *_ in job.choose()] == ["b", "c"]
    job.down = set()
    job.back_up()
    job.back_up()
    assert job.waiting() == []  # there are as many as the job may have


def test_no_one_is_taken_in_when_training_is_over(monkeypatch):
    job = Job(monkeypatch, workers=2, min_workers=1, hosts=["a,b"])
    job.down = {"b"}
    job.choose()
    job.down = set()
    job.back_up()
    job.back_up(epoch=9, batches=0)
    assert job.waiting() == []


def test_too_few_hosts(monkeypatch):
    job = Job(monkeypatch, workers=3, min_workers=2, hosts=["a,b,c"])
    job.down = {"b", "c"}
    with pytest.raises(ClusterError, match=r"Expected 2 workers .* answer: \['b', 'c'\], for 600"):
        job.choose()
    job.now, job.down = 0.0, {"c"}
    assert len(job.choose()) == 2


def test_a_machine_joins_with_all_its_workers_at_once(monkeypatch, capsys):
    monkeypatch.setenv(joining.SECRET, "of this test")
    job = Job(monkeypatch, workers=3, min_workers=1, join_port=0)
    assert len(job.choose()) == 1
    port = capsys.readouterr().err.strip().rpartition(":")[2]
    machine = joining.Machine("127.0.0.1", int(port), 2)
    with machine._seated(0):
        job.back_up()
        assert not job.waiting()
        with machine._seated(1):
            job.back_up()
            assert job.waiting()
            assert "joined with 2 workers" in capsys.readouterr().err
            _, one, other = job.slots.choose()
            for slot in (one, other):
                slot.connection.close()
            job.slots.end(0)


def test_what_is_no_range():
    spec = JobSpec(COMMAND, hosts=["a,b"], min_workers=1)
    with pytest.raises(ClusterError, match="Expected a range of workers"):
        Slots(spec, queue.SimpleQueue(), Screen())


def test_shares_of_the_machine_stay(monkeypatch):
    """The worker behind a slot that is left out keeps its own GPU."""
    monkeypatch.setattr(
        start.gpus, "divide", lambda _, count: [{"GPU": str(n)} for n in range(count)]
    )
    slots = (Slot(None, 0, 0, 2, share=(0, 3)), Slot(None, 1, 1, 2, share=(2, 3)))
    given = list(start.variables_of(JobSpec(COMMAND), slots, "h:1", 0))
    assert [one["GPU"] for one in given] == ["0", "2"]
    assert [one["KERASDIST_LOCAL_RANK"] for one in given] == ["0", "1"]
    assert start.orders_of(JobSpec(COMMAND), slots[1], {})["local_workers"] == 3
