"""Values as JSON and arrays, and back."""

import collections
import copy
import json
import pathlib
import random

import keras
import numpy as np
import pytest

from kerasdist.callbacks.backup.encoding import (
    Encoder,
    Remembering,
    decode,
    digest,
    filled,
    numbered,
)


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


class Record:
    def __init__(self, loss):
        self.loss = loss


class Recording(keras.callbacks.Callback):
    """Holds an object from the begin on, and makes others."""

    def __init__(self):
        super().__init__()
        self.kept, self.best = [Record(0.0)], None


@pytest.mark.parametrize("made", [Record(2.0), collections.Counter(a=2), random.Random(2)])
def test_what_the_script_does_not_make_again_is_left_out_and_said(made):
    before, after = Recording(), Recording()
    remembering = Remembering([before])
    before.kept[0].loss = 1.0
    before.kept += [3, made]
    before.best = copy.copy(made)
    state = remembering.state()
    kind = type(made).__name__
    assert remembering.lost() == [f"Recording.kept[2] ({kind})", f"Recording.best ({kind})"]
    Remembering([after]).put_back(json.loads(json.dumps(state)))
    assert (after.kept[0].loss, after.kept[1:], after.best) == (1.0, [3], None)
