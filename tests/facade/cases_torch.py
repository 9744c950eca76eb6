"""Custom loops: what is particular to PyTorch, whose replicas are threads."""

import contextlib
import gc
import threading
import time
import warnings

import numpy as np
import pytest

from tests import environment
from tests.conformance.lazy import kd, keras, ops, torch
from tests.facade.case import of_backend
from tests.facade.lab import variable_of

case = of_backend("torch")


def rank():
    return kd.get_replica_context().replica_id_in_sync_group


def numbers(strategy, value):
    return [one.tolist() for one in strategy.local_results(value)]


@case
def backward_gives_each_replica_its_gradient(strategy):
    weight = variable_of(strategy, 2.0)

    def step():
        (weight.value * (rank() + 1.0)).backward()
        gradient, weight.value.grad = weight.value.grad.clone(), None
        return gradient

    for _ in range(2):
        assert numbers(strategy, strategy.run(step)) == [1.0, 2.0]
    assert weight.value.grad is None


@case
def gradients_despite_no_grad(strategy):
    weight = variable_of(strategy, 2.0)
    with torch.no_grad():
        run = strategy.run(lambda: kd.value_and_grad(lambda: weight * weight, [weight]))
    assert numbers(strategy, run[0]) == numbers(strategy, run[1][0]) == [4.0, 4.0]


@case
def parameters_of_torchs_modules(strategy):
    with strategy.scope():
        wrapped = keras.layers.TorchModuleWrapper(torch.nn.Linear(2, 1))
        optimizer = keras.optimizers.SGD(0.0)
    total = lambda: ops.sum(wrapped(ops.ones((1, 2))))  # noqa: E731

    def step():
        loss = lambda: total() * (rank() + 1.0)  # noqa: E731
        _, gradients = kd.value_and_grad(loss, wrapped.trainable_variables)
        optimizer.apply(gradients, wrapped.trainable_variables)
        return gradients[1]

    _, outside = kd.value_and_grad(total, wrapped.trainable_variables)
    assert outside[1].tolist() == [1.0]
    assert numbers(strategy, strategy.run(step)) == [[1.0], [2.0]]


@case
def fit_in_a_merge_call_and_run_in_value_and_grad_are_refused(strategy):
    weight = variable_of(strategy, 2.0)
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    merge = lambda given: model.predict(np.ones((2, 1), "float32"), verbose=0)  # noqa: E731
    with pytest.raises(kd.errors.ScopeError, match="merge_call"):
        strategy.run(lambda: kd.get_replica_context().merge_call(merge))
    with pytest.raises(kd.errors.ScopeError, match="value_and_grad"):
        kd.value_and_grad(lambda: strategy.reduce("SUM", strategy.run(rank), None), [weight])


@case
def components_end_with_their_variable(strategy):
    kept = strategy.replica_set.components._kept

    def used():
        own = variable_of(strategy, 0.0, trainable=False)
        strategy.run(lambda: own.assign_add(rank() + 1.0) is None)
        return id(own), len(kept.variables())

    key, before = used()
    gc.collect()
    now = [*map(id, kept.variables())]
    assert (before - len(now), key in now) == (1, False)


@case
def a_component_gives_way_to_a_change_from_outside(strategy):
    """Assigning from outside sets every replica's value; reads return replica 0's value."""
    own = variable_of(strategy, 0.0, trainable=False)
    seen = []
    for change in (lambda: None, lambda: own.assign(5.0), lambda: own.value.data.add_(1.0)):
        change()
        seen.append(numbers(strategy, strategy.run(lambda: own + 0.0)))
        strategy.run(lambda: own.assign_add(rank() + 1.0) is None)
    assert seen == [[0.0, 0.0], [5.0, 5.0], [6.0, 7.0]]
    assert float(own.numpy()) == 7.0


@case
def only_a_function_on_one_replica_is_compiled(strategy):
    doubled = kd.function(jit_compile=True)(lambda x: x * 2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            assert numbers(strategy, strategy.run(doubled, args=(torch.ones(()),))) == [2.0, 2.0]
    assert sum("jit_compile" in str(one.message) for one in caught) == 1


@case
def replicas_take_turns(strategy):
    """The last replica that reaches a collective goes on first."""
    events = []

    def step():
        for number in range(3):
            events.append((rank(), number))
            time.sleep(0.001)
        kd.get_replica_context().all_reduce("SUM", torch.ones(()))
        events.append((rank(), "met"))

    strategy.run(step)
    turns = [(replica, number) for replica in range(2) for number in range(3)]
    assert events == [*turns, (1, "met"), (0, "met")]


@case
def a_replica_that_comes_too_late_writes_nothing(strategy):
    """A replica that is late at a collective writes nothing after the step has failed."""
    strategy.replica_set.timeout = 0.1
    kinds = [{}, {"synchronization": "on_read", "aggregation": "sum"}]
    written = [variable_of(strategy, 1.0, trainable=False, **kind) for kind in kinds]
    goes_on, ended = threading.Event(), threading.Event()

    def step():
        if rank():
            goes_on.wait(60)
            for one in written:
                one.assign(9.0)
            ended.set()
        kd.get_replica_context().all_reduce("SUM", ops.ones(()))

    with pytest.raises(kd.errors.ReplicaError, match="no sign of replica 1"):
        strategy.run(step)
    before = [float(one.value) for one in written]
    goes_on.set()
    assert ended.wait(60)
    assert before == [float(one.value) for one in written]
    assert written[0].numpy()[()] == 1.0


@case
def a_replica_waits_as_long_as_the_meeting_timeout_says(strategy):
    """A replica waits as long as KERASDIST_MEETING_TIMEOUT says, here 1 s."""
    never = threading.Event()
    with environment.variables(KERASDIST_MEETING_TIMEOUT="1"):
        others = kd.MirroredStrategy(["cpu:0", "cpu:1"])

    def step():
        if rank():
            never.wait(30)
        return kd.get_replica_context().all_reduce("sum", 1.0)

    said = "Expected every replica within 1 s. Received: no sign of replica 1"
    with pytest.raises(kd.errors.ReplicaError, match=f"{said}.*raise KERASDIST_MEETING_TIMEOUT"):
        others.run(step)
    never.set()


def require_one_devices(strategy, *layers, train):
    """What training returns, and the weights, are those of the same model on one device."""
    found = []
    for scope in (contextlib.nullcontext(), strategy.scope()):
        keras.utils.set_random_seed(4)
        with scope:
            model = keras.Sequential([*(make() for make in layers), keras.layers.Dense(1)])
            model.compile("sgd", "mse", weighted_metrics=["mae"])
        found.append([*train(model), *model.get_weights()])
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)


@case
def a_sum_that_layers_read_is_that_of_all_replicas(strategy):
    class WarmingUp(keras.layers.Layer):
        def build(self, shape):
            self.seen = self.add_weight(initializer="zeros", trainable=False, aggregation="sum")

        def call(self, x):
            scale = ops.minimum(1.0, (10 + self.seen) / 30)
            self.seen.assign_add(ops.cast(ops.shape(x)[0], "float32"))
            return x * scale

    x = np.random.default_rng(0).normal(size=(15, 3)).astype("float32")

    def train(model):
        fitted = model.fit(x, x[:, :1], batch_size=5, epochs=3, shuffle=False, verbose=0)
        return [fitted.history["loss"]]

    require_one_devices(strategy, lambda: keras.Input((3,)), WarmingUp, train=train)


@case
def a_buffer_that_a_step_changes_is_refused(strategy):
    class Counting(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def call(self, x, training=False):
            if training:
                self.calls += 1
            return x + 0 * self.calls

    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), Counting(), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    x = np.ones((4, 2), "float32")
    model.predict(x, verbose=0)
    with pytest.raises(kd.errors.UnsupportedError, match="the buffer 'counting"):
        model.fit(x, x[:, :1], verbose=0)


@case
def masked_weights_of_a_batch_may_be_of_numpy(strategy):
    weights = np.random.default_rng(0).uniform(1, 2, (5, 3)).astype("float32")
    x = np.array([[[1.0], [2.0], [0.0]]] * 5, "float32") * np.arange(1, 6)[:, None, None]
    given = weights.copy()
    require_one_devices(
        strategy,
        lambda: keras.Input((3, 1)),
        keras.layers.Masking,
        train=lambda model: model.train_on_batch(x, 2 * x, sample_weight=given),
    )
    assert (given == weights).all()
