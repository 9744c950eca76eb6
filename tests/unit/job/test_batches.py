"""Workers whose batches have other sizes are found by what their signs of life say."""

import pytest

from kerasdist.job.comparison import STEPS_BEYOND, BatchHistory, came_apart


def report(*runs, clears=0):
    history = BatchHistory()
    for _ in range(clears):
        history.add(1)
        history.clear()
    for count, form in runs:
        for _ in range(count):
            history.add(form)
    return history.report()


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        # At the step that differs, and not before all are well beyond it.
        ([(30, 4)], [(3, 4), (1, 6), (26, 4)], "batch 4='6' on worker 1"),
        ([(30, 4)], [(30, 6)], "batch 1='6' on worker 1"),
        ([(9, 4), (1, 2), (40, 4)], [(9, 4), (1, 2), (5, 4), (35, 8)], "batch 16='8' on worker 1"),
        ([(3 + STEPS_BEYOND, 4)], [(3, 4), (90, 6)], None),
        ([(4 + STEPS_BEYOND, 4)], [(3, 4), (90, 6)], "batch 4="),
        # One worker is ahead of the other.
        ([(60, 4)], [(80, 4), (9, 6)], None),
        ([(60, 4)], [(60, 4)], None),
        ([], [(60, 4)], None),
    ],
)
def test_the_first_batch_that_differs_is_named(one, other, said):
    found = came_apart([report(*one), report(*other)])
    assert (found is None) if said is None else (found is not None and said in found)


def test_workers_that_stand_still_have_no_steps_to_come():
    reports = [report((3, 4), (1, "4 program a")), report((3, 4), (1, "4 program b"))]
    assert came_apart(reports) is None
    said = "batch 4='4 program b' on worker 1, '4 program a' on worker 0"
    assert came_apart(reports, idle=True) == said
    reports[1] = report((3, 4))  # which is late, but has not read another batch
    assert came_apart(reports, idle=True) is None
    assert came_apart([report((4, 4))] * 2, idle=True) is None


def test_workers_in_other_epochs_or_without_a_word_are_not_compared():
    assert came_apart([report((60, 4)), report((60, 6), clears=1)]) is None
    assert came_apart([report((60, 4)), None]) is None


def test_thousands_of_workers_are_compared_in_one_pass():
    """Each worker against each would be 16 million comparisons a second."""
    reads = []

    class Counted(list):
        def __iter__(self):
            reads.append(len(self))
            return super().__iter__()

    reports = [dict(report((30, 4))) for _ in range(4095)] + [dict(report((3, 4), (27, 6)))]
    for one in reports:
        one["changes"] = Counted(one["changes"])
    said = came_apart(reports)
    assert said is not None
    assert said.startswith("batch 4='6' on worker 4095, '4' on workers 0, 1, 2, 3, 4, 5, 6, 7 and")
    assert sum(reads) < 2 * 4097


def test_a_worker_at_the_end_of_its_data_is_named_while_another_trains_on():
    ended = BatchHistory()
    for _ in range(7):
        ended.add(4)
    ended.end()
    found = came_apart([report((8, 4)), ended.report()])
    said = "batch 8='none, at the end of its data' on worker 1, 'trains on batch 8' on worker 0"
    assert found == said
    assert came_apart([report((7, 4)), ended.report()]) is None  # it may come yet
    assert came_apart([report((3, 4)), ended.report()]) is None
    ended.clear()
    assert came_apart([report((8, 4), clears=1), ended.report()]) is None


def test_a_step_that_ends_late_counts_as_it_begins():
    """On TensorFlow a graph reads the batch: the history gets the step when it has ended."""
    begun = 7
    ended, waiting = BatchHistory(), BatchHistory(count_begun=lambda: begun)
    waiting.clear()
    ended.clear()
    for history in (ended, waiting):
        for _ in range(7):
            history.add(4)
    ended.end()
    begun += 7
    assert came_apart([waiting.report(), ended.report()]) is None
    begun += 1
    found = came_apart([waiting.report(), ended.report()])
    said = "batch 8='none, at the end of its data' on worker 1, 'trains on batch 8' on worker 0"
    assert found == said
