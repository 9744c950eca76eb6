"""Values as JSON and arrays, and back."""

import collections
import copy
import json
import pathlib
import random
from typing import Any

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
        {"t": (1, [2]), 3: {4}, "f": frozenset([5]), "d": collections.deque([6], maxlen=2)},
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
    """Holds an object from the beginning on, and makes others."""

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


class Holding(keras.callbacks.Callback):
    """Holds a list, an array and a record, each of them twice."""

    def __init__(self, rows, sums):
        super().__init__()
        self.gone = 1
        self.rows, self.sums, self.record = rows, sums, Record(0.0)
        self.all = {"rows": [self.rows], "sums": self.sums}
        self.best: Any = None
        self.once: Any = None
        self.tensor: Any = None
        self.same: Any = None


def restarted(change, *arguments):
    """A callback of a new process, to which what the first one has changed comes back."""
    before, after = Holding([], np.zeros(2)), Holding(*arguments)
    remembering, restored = Remembering([before]), Remembering([after])
    change(before)
    arrays = []
    state = json.loads(json.dumps(numbered(remembering.state(), arrays)))
    restored.put_back(filled(state, arrays))
    return after, remembering.lost()


def test_a_list_where_one_of_the_script_was_in_memory_is_a_new_one():
    def change(one):
        del one.all
        one.rows = None
        one.rows = [1]  # Python stores it at the address of the first object

    rows = []
    one, lost = restarted(change, rows, np.zeros(2))
    assert not lost
    assert (one.rows, rows) == ([1], [])


def test_what_is_held_twice_stays_one_object():
    def change(one):
        one.rows.append(1)
        one.sums += 1
        one.best = one.record
        one.once = one.all["rows"]
        one.once += [one.once, one.record]
        one.tensor = one.same = keras.ops.convert_to_tensor([2.0])

    rows, sums = [], np.zeros(2)
    one, lost = restarted(change, rows, sums)
    assert not lost
    assert one.rows is one.all["rows"][0] is rows
    assert rows == [1]
    assert one.sums is one.all["sums"] is sums
    assert sums.tolist() == [1, 1]
    assert one.best is one.record is one.once[2]
    assert one.once is one.all["rows"] is one.once[1]
    assert one.tensor is one.same
    assert float(one.same[0]) == 2.0


def test_what_the_run_has_replaced_does_not_touch_what_the_script_holds():
    def change(one):
        one.rows = [*one.rows, 1]
        one.sums = one.sums + 1
        one.all["rows"][0].append(2)
        del one.gone

    rows, sums = [], np.zeros(2)
    one, lost = restarted(change, rows, sums)
    assert not lost
    assert (one.rows, rows, one.all["rows"][0] is rows) == ([1], [2], True)
    assert one.sums.tolist() == [1, 1]
    assert one.all["sums"] is sums
    assert sums.tolist() == [0, 0]
    assert not hasattr(one, "gone")


def test_a_callback_gets_the_state_of_the_one_that_watched_the_same():
    before = [keras.callbacks.EarlyStopping(one) for one in ("loss", "val_loss")]
    remembering = Remembering(before)
    before[0].best, before[1].best = 1.0, 2.0
    after = [keras.callbacks.EarlyStopping(one) for one in ("mae", "val_loss")]
    Remembering(after).put_back(remembering.state())
    assert [one.best for one in after] == [None, 2.0]
