"""Values as JSON and arrays, and back."""

import collections
import json
import pathlib

import numpy as np
import pytest

from kerasdist.callbacks.backup.encoding import Encoder, decode, digest, filled, numbered


def through(value, current=None):
    encoder, arrays = Encoder(), [None, None, None]
    form = json.loads(json.dumps(numbered(encoder.encode(value, "it"), arrays)))
    return decode(filled(form, arrays), current), encoder.lost


@pytest.mark.parametrize(
    "value",
    [
        [None, True, 1, 2.5, "word"],
        {"t": (1, [2]), 3: {4}, "f": frozenset([5]), "d": collections.deque([6])},
        b"\x00\xff",
        [float("inf"), -0.0],
        np.float32(0.1),
        np.array(["a", "bc"]),
    ],
)
def test_a_value_comes_back(value):
    back, lost = through(value)
    assert (repr(back), type(back), lost) == (repr(value), type(value), {})


def test_an_array_comes_back_to_be_written():
    array = np.arange(6.0).reshape(2, 3).T
    back, _ = through(array)
    np.testing.assert_array_equal(back, array)
    assert back.flags.writeable


def test_code_is_left_as_it_is():
    assert through([print, np, Encoder, pathlib.Path("a")], [1, 2, 3, 4]) == ([1, 2, 3, 4], {})


@pytest.mark.parametrize(
    ("one", "other"), [([1, (2.0, "x")], [1, (2.0, "y")]), (np.ones(1), np.zeros(1))]
)
def test_digests_tell_values_apart(one, other):
    first, again, second = (digest(Encoder().encode(value, "a")) for value in (one, one, other))
    assert first == again != second
