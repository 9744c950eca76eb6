"""Custom loops, what is particular to PyTorch: in a fresh process, as Keras fixes its backend.

What holds on every backend alike is in tests/facade.
"""

import json

import pytest

from tests.fresh import run_fresh

SCRIPT = """
import gc, json, threading, traceback, warnings
import kerasdist as kd
import keras, numpy as np, torch
from keras import ops
from kerasdist.backends.torch.rendezvous import Rendezvous

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
def losses_of_layers_in_value_and_grad():
    class Penalty(keras.layers.Layer):
        def call(self, x):
            self.add_loss(ops.sum(x))
            return x
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, "linear"), Penalty()])
    _, gradients = kd.value_and_grad(
        lambda: ops.sum(model(np.ones((1, 2)))) + sum(model.losses), model.trainable_variables
    )
    return gradients[1].tolist()

@case
def what_differentiates_may_make_variables():
    made = []
    def value():
        if not made:
            made.append(keras.Sequential([keras.layers.Dense(2), keras.layers.Dropout(0.1)]))
            made.append(keras.optimizers.Adam(0.5))
        return ops.sum(made[0](np.ones((1, 2)))) * weight
    kd.value_and_grad(value, [weight])
    _, gradients = kd.value_and_grad(value, made[0].trainable_variables)
    return [gradients[1].tolist(), float(made[1].learning_rate.numpy())]

@case
def layers_are_built_once_even_without_turns():
    from kerasdist.backends.torch import pace
    import contextlib
    of_run = pace.LoopPace.of_run
    pace.LoopPace.of_run = lambda *_: contextlib.nullcontext(False)
    try:
        counts = set()
        for _ in range(10):
            with strategy.scope():
                model = keras.Sequential([keras.layers.Dense(3), keras.layers.LSTM(2)])
            strategy.run(lambda: model(np.ones((1, 2, 2), "float32")))
            counts.add(len(model.trainable_variables))
    finally:
        pace.LoopPace.of_run = of_run
    return list(counts)

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
    key, before = id(own), len(kept)
    del own
    gc.collect()
    return [before - len(kept), key in kept]

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
def a_step_may_be_a_method():
    class Trainer:
        scale = 3
        @kd.function
        def step(self, x):
            return x * self.scale
    return Trainer().step(2)

turns = []
begin = Rendezvous.begin
def watched(self, count, *, turns):
    globals()["turns"].append(turns)
    return begin(self, count, turns=turns)
Rendezvous.begin = watched

def paced(layers, wrap, extra=lambda: 0):
    with strategy.scope():
        model = keras.Sequential([keras.Input((64,)), *layers, keras.layers.Dense(1)])
    def replica_step(x):
        return ops.sum(model(x, training=True)) + extra()
    step = wrap(lambda x: strategy.run(replica_step, args=(x,)))
    [batch] = strategy.distribute_dataset([np.ones((128, 64), "float32")])
    turns.clear()
    for _ in range(3):
        step(batch)
    return list(turns)

class Own(keras.layers.Layer):
    def call(self, x):
        return x

wide = lambda: [keras.layers.Dense(256), keras.layers.Dense(256), keras.layers.Dropout(0.5)]

@case
def pace():
    return {
        "in a function": paced(wide(), kd.function),
        "not in a function": paced(wide(), lambda step: step),
        "a small model": paced([keras.layers.Dense(4)], kd.function),
        "a layer of the user's": paced([*wide(), Own()], kd.function),
        "a draw": paced(wide(), kd.function, lambda: torch.rand(())),
    }

@case
def loops_in_threads():
    failed = []
    def work(number):
        try:
            for _ in range(20):
                result = strategy.run(lambda: ops.ones(()) * (number + rank()))
                assert numbers(result) == [number, number + 1]
        except BaseException as error:
            failed.append(repr(error))
    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads: thread.start()
    for thread in threads: thread.join(60)
    return failed

print(json.dumps(told))
"""

ALL_TURNS, THEN_AT_ONCE = [True] * 3, [True, False, False]

EXPECTED = {
    "backward_gives_each_replica_its_gradient": [[1.0, 2.0], [1.0, 2.0], None],
    "gradients_despite_no_grad": [[4.0, 4.0], [4.0, 4.0]],
    "parameters_of_torchs_modules": [[[1.0], [2.0]], [1.0]],
    "losses_of_layers_in_value_and_grad": [2.0],
    "what_differentiates_may_make_variables": [[2.0, 2.0], 0.5],
    "layers_are_built_once_even_without_turns": [5],
    "run_in_a_merge_call_is_refused": True,
    "run_in_value_and_grad_is_refused": True,
    "components_end_with_their_variable": [1, False],
    # Its own, the value from outside, and that again: the first replica's component is the value.
    "a_component_gives_way_to_a_change_from_outside": [[[0.0, 0.0], [5.0, 5.0], [6.0, 7.0]], 7.0],
    "only_a_function_on_one_replica_is_compiled": [[[2.0, 2.0]] * 2, 1],
    "a_step_may_be_a_method": 6,
    "pace": {
        "in a function": THEN_AT_ONCE,
        "not in a function": ALL_TURNS,
        "a small model": ALL_TURNS,
        "a layer of the user's": ALL_TURNS,
        "a draw": ALL_TURNS,
    },
    "loops_in_threads": [],
}


@pytest.fixture(scope="module")
def told():
    return json.loads(run_fresh(SCRIPT, KERAS_BACKEND="torch").splitlines()[-1])


@pytest.mark.parametrize("case", EXPECTED)
def test_runner(told, case):
    assert told[case] == EXPECTED[case], told[case]
