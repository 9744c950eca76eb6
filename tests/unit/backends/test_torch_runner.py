"""Custom loops, what is particular to PyTorch: in a fresh process, as Keras fixes its backend.

What holds on every backend alike is in tests/facade.
"""

import json

import pytest

from tests.fresh import run_forked

SCRIPT = """
import gc, json, threading, time, traceback, warnings
import kerasdist as kd
import keras, numpy as np, torch
from keras import ops

strategy = kd.MirroredStrategy(["cpu:0", "cpu:1"])
rank = lambda: kd.get_replica_context().replica_id_in_sync_group
numbers = lambda value: [t.tolist() for t in strategy.local_results(value)]
told = {}

def case(function):
    try:
        told[function.__name__] = function()
    except BaseException:
        told[function.__name__] = traceback.format_exc()

with strategy.scope():
    weight = keras.Variable(2.0)

@case
def backward_gives_each_replica_its_gradient():
    def step():
        (weight.value * (rank() + 1.0)).backward()
        gradient, weight.value.grad = weight.value.grad.clone(), None
        return gradient
    return [numbers(strategy.run(step)), numbers(strategy.run(step)), weight.value.grad]

@case
def gradients_despite_no_grad():
    with torch.no_grad():
        run = strategy.run(lambda: kd.value_and_grad(lambda: weight * weight, [weight]))
    return [numbers(run[0]), numbers(run[1][0])]

@case
def parameters_of_torchs_modules():
    with strategy.scope():
        wrapped = keras.layers.TorchModuleWrapper(torch.nn.Linear(2, 1))
        optimizer = keras.optimizers.SGD(0.0)
    def step():
        def loss():
            return ops.sum(wrapped(ops.ones((1, 2)))) * (rank() + 1.0)
        _, gradients = kd.value_and_grad(loss, wrapped.trainable_variables)
        optimizer.apply(gradients, wrapped.trainable_variables)
        return gradients[1]
    _, outside = kd.value_and_grad(
        lambda: ops.sum(wrapped(ops.ones((1, 2)))), wrapped.trainable_variables
    )
    return [numbers(strategy.run(step)), outside[1].tolist()]

@case
def run_in_a_merge_call_is_refused():
    try:
        strategy.run(lambda: kd.get_replica_context().merge_call(lambda s: s.run(rank)))
    except kd.errors.ScopeError as error:
        return "merge_call" in str(error)

@case
def run_in_value_and_grad_is_refused():
    try:
        kd.value_and_grad(lambda: strategy.reduce("SUM", strategy.run(rank), None), [weight])
    except kd.errors.ScopeError as error:
        return "value_and_grad" in str(error)

@case
def components_end_with_their_variable():
    with strategy.scope():
        own = keras.Variable(0.0, trainable=False)
    strategy.run(lambda: own.assign_add(rank() + 1.0) is None)
    kept = strategy.replica_set.components._kept
    key, before = id(own), len(kept.ids())
    del own
    gc.collect()
    return [before - len(kept.ids()), key in kept.ids()]

@case
def a_component_gives_way_to_a_change_from_outside():
    with strategy.scope():
        own = keras.Variable(0.0, trainable=False)
    seen = []
    for change in (lambda: None, lambda: own.assign(5.0), lambda: own.value.data.add_(1.0)):
        change()
        seen.append(numbers(strategy.run(lambda: own + 0.0)))
        strategy.run(lambda: own.assign_add(rank() + 1.0) is None)
    return [seen, float(own.numpy())]

@case
def only_a_function_on_one_replica_is_compiled():
    @kd.function(jit_compile=True)
    def doubled(x):
        return x * 2
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = [numbers(strategy.run(doubled, args=(torch.ones(()),))) for _ in range(2)]
    return [result, sum("jit_compile" in str(one.message) for one in caught)]

@case
def replicas_take_turns():
    events = []
    def step():
        for number in range(3):
            events.append((rank(), number))
            time.sleep(0.001)
        kd.get_replica_context().all_reduce("SUM", torch.ones(()))
        events.append((rank(), "met"))
    strategy.run(step)
    return [list(event) for event in events]

@case
def a_replica_that_comes_too_late_writes_nothing():  # DEFECTS 21
    others = kd.MirroredStrategy(["cpu:0", "cpu:1"])
    others.replica_set.timeout = 0.1
    with others.scope():
        kinds = [{}, {"synchronization": "on_read", "aggregation": "sum"}]
        written = [keras.Variable(1.0, trainable=False, **kind) for kind in kinds]
    values = lambda: [float(variable.value) for variable in written]
    goes_on, ended = threading.Event(), threading.Event()
    def step():
        if rank():
            goes_on.wait(60)
            for variable in written: variable.assign(9.0)
            ended.set()
        kd.get_replica_context().all_reduce("SUM", ops.ones(()))
    try:
        others.run(step)
    except kd.errors.ReplicaError as error:
        before = values()
        goes_on.set()
        assert ended.wait(60)
        return ["no sign of replica 1" in str(error), before == values(), written[0].numpy()[()]]

print(json.dumps(told, default=float))
"""

EXPECTED = {
    "backward_gives_each_replica_its_gradient": [[1.0, 2.0], [1.0, 2.0], None],
    "gradients_despite_no_grad": [[4.0, 4.0], [4.0, 4.0]],
    "parameters_of_torchs_modules": [[[1.0], [2.0]], [1.0]],
    "run_in_a_merge_call_is_refused": True,
    "run_in_value_and_grad_is_refused": True,
    "components_end_with_their_variable": [1, False],
    # Its own, the value from outside, and that again: the first replica's component is the value.
    "a_component_gives_way_to_a_change_from_outside": [[[0.0, 0.0], [5.0, 5.0], [6.0, 7.0]], 7.0],
    "only_a_function_on_one_replica_is_compiled": [[[2.0, 2.0]] * 2, 1],
    # The last to arrive at a meeting goes on first.
    "replicas_take_turns": [
        *([rank, number] for rank in (0, 1) for number in range(3)),
        [1, "met"],
        [0, "met"],
    ],
    "a_replica_that_comes_too_late_writes_nothing": [True, True, 1.0],
}


@pytest.fixture(scope="module")
def told():
    return json.loads(run_forked(SCRIPT, "torch").splitlines()[-1])


@pytest.mark.parametrize("case", EXPECTED)
def test_runner(told, case):
    assert told[case] == EXPECTED[case], told[case]


HANGING = """
import threading
import kerasdist as kd
from kerasdist.errors import ReplicaError

never = threading.Event()
strategy = kd.MirroredStrategy(["cpu:0", "cpu:1"])

def step():
    context = kd.get_replica_context()
    if context.replica_id_in_sync_group:
        never.wait(30)
    return context.all_reduce("sum", 1.0)

try:
    strategy.run(step)
except ReplicaError as error:
    print(error)
never.set()
"""


def test_defects_21_a_replica_waits_as_long_as_the_meeting_timeout_says():
    said = run_forked(HANGING, "torch", KERASDIST_MEETING_TIMEOUT="1")
    assert "Expected every replica within 1 s. Received: no sign of replica 1" in said
    assert "raise KERASDIST_MEETING_TIMEOUT" in said
