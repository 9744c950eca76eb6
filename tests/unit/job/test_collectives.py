"""What workers record of their collectives, and how the first that differs is found."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from kerasdist.errors import DisagreementError, JobError
from kerasdist.job.collectives import VARIABLE, CollectiveLog, log_if_wanted
from kerasdist.job.comparison import described_difference
from kerasdist.job.job import Job

SECONDS = 30


class Workers:
    """Workers of a job, each in a thread, that exchange values."""

    def __init__(self, count: int):
        self._barrier = threading.Barrier(count)
        self._values: dict[int, object] = {}
        self.logs = [CollectiveLog() for _ in range(count)]
        self.exchanges = 0

    def exchange(self, rank: int, value: object) -> list:
        self._values[rank] = value
        self._barrier.wait(SECONDS)
        everyone = [self._values[one] for one in range(len(self.logs))]
        if self._barrier.wait(SECONDS) == 0:
            self.exchanges += 1
        return everyone

    def compare(self) -> list[str]:
        """What each worker is told; an empty text if nothing differs."""

        def one(rank: int) -> str:
            try:
                _Worker(self, rank).compare_collectives("now")
            except DisagreementError as error:
                return str(error)
            return ""

        with ThreadPoolExecutor(len(self.logs)) as threads:
            return list(threads.map(one, range(len(self.logs))))


class _Worker:
    def __init__(self, workers: Workers, rank: int):
        self._exchange = lambda value: workers.exchange(rank, value)
        self.collectives = workers.logs[rank]

    compare_collectives, first_difference = Job.compare_collectives, Job.first_difference

    def all_have_one(self, label, value):
        return len(set(self._exchange(value))) == 1

    def broadcast_object(self, label, value):
        return self._exchange(value)[0]

    def choose(self, label, value, choose):
        return choose(self._exchange(value))

    def assert_equal(self, label, facts, advice):
        everyone = self._exchange(facts)
        if any(one != facts for one in everyone):
            raise DisagreementError(described_difference(everyone))


def _recorded(*sequences: list[str]) -> Workers:
    workers = Workers(len(sequences))
    for log, entries in zip(workers.logs, sequences, strict=True):
        for entry in entries:
            log.add(entry)
    return workers


@pytest.mark.parametrize("length", [1, 2, 3, 64, 1000])
def test_the_first_that_differs_is_found_in_few_exchanges(length):
    equal = _recorded(["a"] * length, ["a"] * length)
    assert (equal.compare(), equal.exchanges) == (["", ""], 1)
    for first in {0, 1, length // 2, length - 1} & set(range(length)):
        common = [str(number) for number in range(length)]
        other = [*common[:first], "else", *common[first + 1 :]]
        workers = _recorded(common, other, common)
        said = workers.compare()
        expected = f"collective {first + 1}='else' on worker 1, '{first}' on workers 0, 2"
        assert said == [expected] * 3, said
        assert workers.exchanges <= 5


def test_a_collective_too_many_is_found():
    workers = _recorded(["a", "b"], ["a", "b", "c"])
    said = "collective 3='c' on worker 1, 'none, only 2 so far' on worker 0"
    assert workers.compare() == [said] * 2


def test_numbers_go_on_after_a_comparison():
    workers = _recorded(["a"], ["a", "b"])
    assert workers.compare()[0].startswith("collective 2=")
    for rank, log in enumerate(workers.logs):
        log.add("c")
        log.add(f"of {rank}")
    assert workers.compare()[0].startswith("collective 4='of 1' on worker 1")
    workers.logs[0].add("d")
    assert workers.logs[0].last() == ["number 5: d"]


def test_the_line_of_the_user_is_recorded():
    log = CollectiveLog()
    log.record("all_reduce", "float32[3] in the group of all workers")
    line = test_the_line_of_the_user_is_recorded.__code__.co_firstlineno + 2
    entry = f"all_reduce float32[3] in the group of all workers, test_collectives.py:{line}"
    assert log.last() == [f"number 1: {entry}"]


def test_nothing_is_recorded_unless_it_is_asked_for():
    assert log_if_wanted({}) is None
    assert log_if_wanted({VARIABLE: "0"}) is None
    assert isinstance(log_if_wanted({VARIABLE: "1"}), CollectiveLog)
    with pytest.raises(JobError, match=f"Received: {VARIABLE}='yes'"):
        log_if_wanted({VARIABLE: "yes"})
