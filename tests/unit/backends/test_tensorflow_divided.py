"""Tripwires: where TensorFlow and Keras read, assign and update variables that replicas divide.

A failure here means that one of them moved something, and
`kerasdist/backends/tensorflow/private/divided.py` or `divided_state.py` is to be mended.
"""

import json

import pytest

from tests.fresh import run_fresh

PROBE = """
import collections, json
import kerasdist as kd

kd.config.set_logical_cpu_devices(2)
import keras
import tensorflow as tf
from kerasdist.backends.tensorflow import divided_state
from kerasdist.backends.tensorflow.division import Division

called = collections.Counter()

def counted(name):
    original = getattr(divided_state, name)

    def hook(*args):
        called[name] += 1
        return original(*args)

    setattr(divided_state, name, hook)

for name in ("_update", "_average", "_are_whole"):
    counted(name)

strategy = kd.MirroredStrategy(["cpu:0", "cpu:1"], sharding=kd.Sharding("optimizer", min_size=4))
with strategy.scope():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(4)])
    model.compile(keras.optimizers.SGD(0.1, 0.9, use_ema=True), "mse")
swap = keras.callbacks.SwapEMAWeights()
model.fit(tf.ones((4, 2)), tf.ones((4, 4)), batch_size=4, verbose=0, callbacks=[swap])
model.evaluate(tf.ones((4, 2)), tf.ones((4, 4)), verbose=0, callbacks=[swap])
slot = next(one for one in model.optimizer.variables if one.path.endswith("kernel_momentum"))
native = slot.value
native.assign(tf.reshape(tf.range(8.0), (2, 4)))

seen = []
def update(copy, value):
    copy.assign_add(value)
    seen.append([native.shape.as_list(), native.read_value().shape.as_list()])

strategy.extended.update(native, update, args=(tf.ones((2, 2)),))
division = Division((5, 4), 1, 2, 0)
rows = tf.IndexedSlices(tf.reshape(tf.range(8.0), (2, 4)), tf.constant([3, 1]), tf.constant([5, 4]))
columns = division.part(rows, 1)
of_rows = Division((6, 4), 0, 2, 0)
below = of_rows.part(tf.IndexedSlices(rows.values, rows.indices, tf.constant([6, 4])), 1)
print(json.dumps({
    "called": sorted(called),
    "whole": native.read_value().numpy().tolist(),
    "parts": [one.numpy().tolist() for one in native.values],
    "shapes": [native.shape.as_list(), native.get_shape().as_list(), slot.shape.as_list()],
    "seen": seen,
    "columns": [columns.values.numpy().tolist(), columns.indices.numpy().tolist()],
    "below": [below.values.numpy().tolist(), below.indices.numpy().tolist()],
    "again": of_rows.part(below, 1) is below,
}))
"""


@pytest.fixture(scope="module")
def probe():
    return json.loads(run_fresh(PROBE, KERAS_BACKEND="tensorflow").splitlines()[-1])


def test_keras_updates_and_averages_where_the_hooks_are(probe):
    assert probe["called"] == ["_are_whole", "_average", "_update"]


def test_each_copy_is_a_part_of_what_is_read(probe):
    assert probe["whole"] == [[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]]
    assert probe["parts"] == [[[1.0, 2.0], [5.0, 6.0]], [[3.0, 4.0], [7.0, 8.0]]]


def test_an_update_sees_its_part_and_all_other_code_the_whole(probe):
    assert probe["shapes"] == [[2, 4]] * 3
    assert probe["seen"] == [[[2, 2], [2, 2]]] * 2


def test_a_sparse_gradient_is_cut_by_columns_or_rows(probe):
    assert probe["columns"] == [[[2.0, 3.0], [6.0, 7.0]], [3, 1]]
    assert probe["below"] == [[[0.0, 1.0, 2.0, 3.0]], [0]]
    assert probe["again"]
