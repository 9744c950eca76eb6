"""Tripwires: what many workers need of TensorFlow's private parts is where it should be.

A failure here means that TensorFlow moved something, and
`kerasdist/backends/tensorflow/private/worker_strategy.py` is the file to mend.
"""

import json

import pytest

from tests.fresh import run_fresh

# A job of one: the same native strategy, whose sums are of one worker.
PROBE = """
import json, types
import keras
import tensorflow as tf
from kerasdist.backends.tensorflow.private import worker_strategy
from kerasdist.backends.tensorflow.replica.all_reduce import communication_hint
from kerasdist.backends.tensorflow.workers.worker_group import WorkerGroup
from kerasdist.api.options import CommunicationOptions
from kerasdist.launch.placement import free_port

address = f"127.0.0.1:{free_port()}"
before = worker_strategy.has_started()
worker_strategy.start_server([address], 0)
options = CommunicationOptions(timeout_seconds=20.0)
native_strategy, other = (
    worker_strategy.WorkersStrategy([address], 0, ["/device:CPU:0"], options) for _ in range(2)
)
job = types.SimpleNamespace(rank=0, is_watched=False, collectives=None)
group = WorkerGroup(native_strategy, job, options, shares_memory=True)
told = CommunicationOptions(bytes_per_pack=4, implementation="RING", timeout_seconds=20.0)
small = WorkerGroup(other, job, told, shares_memory=True)

def collectives(group):
    # The hints and time-outs of the collectives that sum two gradients.
    def sums():
        return group.sums([[tf.ones(3)], [tf.ones(3)]])
    operations = tf.function(sums).get_concrete_function().graph.get_operations()
    kind = "CollectiveReduceV2"
    names = ("communication_hint", "timeout_seconds")
    found = [[one.get_attr(name) for name in names] for one in operations if one.type == kind]
    return [[hint.decode(), seconds] for hint, seconds in found]


with native_strategy.scope():
    total, mean, first = (
        keras.Variable(2.0, trainable=False, aggregation=how, synchronization="on_read")
        for how in ("sum", "mean", "only_first_replica")
    )

def reads():
    with native_strategy.scope():
        return [float(one.numpy()) for one in (total, mean, first)]

made = reads()
with native_strategy.scope():
    total.assign(6.0)
assigned = reads()
# What is known is handed out, the first replica's own is not known but read.
for one in (total, mean, first):
    one.value.remember(tf.constant(9.0))
known = reads()
group.runs_loops = True
in_loops = reads()
group.is_in_call = lambda: True
in_a_call = reads()
group.is_in_call = lambda: False
mean.value.mark_equal()

tensors = [tf.constant([1.5]), tf.constant(3, tf.int8), tf.constant([[2.5]], tf.bfloat16)]
sums = group.sums([[one] for one in tensors])
whole, sizes = group.concatenation([tf.constant([True, False])], 0)

print(json.dumps({
    "started": [before, worker_strategy.has_started()],
    "keys": [native_strategy.group_key, other.group_key],
    "is_native": isinstance(native_strategy, tf.distribute.MultiWorkerMirroredStrategy),
    "made": made,
    "assigned": assigned,
    "known": known,
    "in_loops": in_loops,
    "in_a_call": in_a_call,
    "costly": [one is total for one in group.costly([total, mean, first])],
    "sums": [[one.dtype.name, one.numpy().tolist()] for one in sums],
    "whole": [whole.numpy().tolist(), [int(size) for size in sizes]],
    "hints": [
        communication_hint(CommunicationOptions(implementation=name), devices)
        for name in ("AUTO", "RING", "NCCL")
        for devices in (["/device:CPU:0"], ["/job:worker/task:1/device:GPU:0"])
    ],
    "collectives": [collectives(one) for one in (group, small)],
}))
"""


@pytest.fixture(scope="module")
def found():
    return json.loads(run_fresh(PROBE, KERAS_BACKEND="tensorflow", seconds=600))


def test_the_runtime_is_started_by_us(found):
    assert found["started"] == [False, True]
    assert found["is_native"]


def test_strategies_do_not_share_keys(found):
    assert found["keys"][0] != found["keys"][1]


def test_a_variable_is_read_without_the_others_while_it_is_known(found):
    assert found["made"] == [2.0, 2.0, 2.0]
    assert found["assigned"] == [6.0, 2.0, 2.0]
    assert found["known"] == [9.0, 9.0, 2.0]
    assert found["in_a_call"] == [9.0, 9.0, 2.0]


def test_a_variable_is_read_with_the_others_where_loops_may_write(found):
    assert found["in_loops"] == [6.0, 2.0, 2.0]


def test_only_divided_variables_cost_a_collective(found):
    assert found["costly"] == [True]


def test_sums_keep_types_and_shapes(found):
    assert found["sums"] == [["float32", [1.5]], ["int8", 3], ["bfloat16", [[2.5]]]]
    assert found["whole"] == [[True, False], [2]]


def test_hints_are_spelled_as_the_runtime_compares_them(found):
    # No GPU is here, so that two would be virtual ones.
    assert found["hints"] == ["auto", "auto", "ring", "ring", "ring", "nccl"]


def test_sums_travel_as_the_strategy_is_told(found):
    assert found["collectives"] == [[["auto", 20.0]], [["ring", 20.0], ["ring", 20.0]]]
