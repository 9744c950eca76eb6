"""The sizes of batches, step by step, and where two workers came apart."""

import pytest

from kerasdist.input.batch_forms import Course, first_difference


def course(*forms):
    made = Course()
    for form in forms:
        made.note(form)
    return made


def test_equal_forms_in_a_row_are_counted():
    noted = course(4, 4, 4, 2, 4)
    assert noted.runs() == [[3, "4"], [1, "2"], [1, "4"]]
    assert noted.runs() == [[3, "4"], [1, "2"], [1, "4"]]
    noted.clear()
    assert noted.runs() == []


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ((4, 4, 4), (4, 3, 4), (2, ["4", "3"])),
        ((4, 4), (4, 4, 4), (3, [None, "4"])),
        ((8, 4), (4, 8), (1, ["8", "4"])),
    ],
)
def test_the_first_step_that_differs_is_found(one, other, expected):
    assert first_difference([course(*one).runs(), course(*other).runs()]) == expected
