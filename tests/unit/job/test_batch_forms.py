"""The sizes of batches, step by step, and where two workers came apart."""

import pytest

from kerasdist.job.comparison import BatchHistory, first_difference


def history(*forms):
    made = BatchHistory()
    for form in forms:
        made.add(form)
    return made


def test_equal_forms_in_a_row_are_counted():
    seen = history(4, 4, 4, 2, 4)
    assert seen.runs() == [[3, "4"], [1, "2"], [1, "4"]]
    assert seen.runs() == [[3, "4"], [1, "2"], [1, "4"]]
    seen.clear()
    assert seen.runs() == []


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ((4, 4, 4), (4, 3, 4), (2, ["4", "3"])),
        ((4, 4), (4, 4, 4), (3, [None, "4"])),
        ((8, 4), (4, 8), (1, ["8", "4"])),
    ],
)
def test_the_first_step_that_differs_is_found(one, other, expected):
    assert first_difference([history(*one).runs(), history(*other).runs()]) == expected
