"""Values as JSON and arrays, and back."""

import collections
import json
import pathlib
import random
import threading

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


@pytest.mark.parametrize("kind", [np.random.default_rng, np.random.RandomState, random.Random])
def test_a_generator_takes_the_state_of_another(kind):
    one, other = kind(1), kind(2)
    back, lost = through(one, other)
    assert back is other
    assert (one.random(), lost) == (other.random(), {})


class Mine:
    def __init__(self):
        self.names, self.inner, self.lock = ["a"], collections.deque([1]), threading.Lock()


def test_an_object_is_changed_in_place_and_what_is_lost_is_named():
    one, other = Mine(), Mine()
    one.names.append("b")
    one.inner.append(2)
    names = other.names
    back, lost = through(one, other)
    assert back is other
    assert (names, [*other.inner], lost) == (["a", "b"], [1, 2], {"it.lock": "lock"})
    one.inner = one  # a cycle
    assert through(one, Mine())[1] == {"it.lock": "lock"}


def test_code_is_left_as_it_is():
    assert through([print, np, Mine, pathlib.Path("a")], [1, 2, 3, 4]) == ([1, 2, 3, 4], {})


@pytest.mark.parametrize(
    ("one", "other"), [([1, (2.0, "x")], [1, (2.0, "y")]), (np.ones(1), np.zeros(1))]
)
def test_digests_tell_values_apart(one, other):
    first, again, second = (digest(Encoder().encode(value, "a")) for value in (one, one, other))
    assert first == again != second


def test_digests_tell_types_apart():
    one, other = (Encoder().encode(np.array([value]), "a") for value in (1.0, 1))
    assert digest(one) != digest(other)
