"""The facade where there is but one replica: the default strategy's."""

import numpy as np
import pytest

from kerasdist.api import scopes
from kerasdist.api.collectives import CommunicationOptions, ReduceOp
from kerasdist.api.losses import compute_average_loss, scale_regularization_loss
from kerasdist.api.replica_context import checked_axis
from kerasdist.api.strategy import Strategy
from kerasdist.api.values import PerReplica
from kerasdist.backends.base.single_replica import SoleRunner
from kerasdist.errors import ScopeError
from tests.environment import CPU_DEVICES, values
from tests.fresh import run_fresh


@pytest.fixture
def strategy():
    return Strategy(None)


def test_run_calls_the_function(strategy):
    def step(x, *, y):
        here = scopes.get_replica_context()
        assert here.strategy is strategy
        assert here.num_replicas_in_sync == 1
        return {"sum": x + y}

    assert strategy.run(step, args=(1,), kwargs={"y": 2}) == {"sum": 3}
    assert strategy.run(step, args=[PerReplica((1,))], kwargs={"y": PerReplica((2,))})["sum"] == 3
    assert not scopes.has_strategy()


@pytest.mark.parametrize("args", ["text", {"x": 1}, 3, np.zeros(2)])
def test_args_are_a_tuple_or_a_list(strategy, args):
    with pytest.raises(ValueError, match=r"Expected args .*Received: args=.*args=\(x,\)"):
        strategy.run(lambda x: x, args=args)


def test_an_error_leaves_no_scope_open(strategy):
    def wrong():
        raise KeyError("of the user's")

    with pytest.raises(KeyError, match="of the user's"):
        strategy.run(wrong)
    assert not scopes.has_strategy()
    assert scopes.get_replica_context().replica_id_in_sync_group == 0


def test_reduce_and_gather(strategy):
    x = np.array([[1.0, 2.0], [3.0, 4.0]])
    assert strategy.reduce("SUM", x, axis=None) is x
    np.testing.assert_array_equal(strategy.reduce("SUM", x, axis=0), [4.0, 6.0])
    np.testing.assert_array_equal(strategy.reduce(ReduceOp.MEAN, x, axis=-1), [1.5, 3.5])
    assert strategy.gather({"x": x}, axis=1)["x"] is x


@pytest.mark.parametrize("axis", [2, -3])
def test_an_axis_out_of_range(strategy, axis):
    x = np.zeros((2, 2))
    for call in (strategy.gather, lambda x, axis: strategy.reduce("SUM", x, axis)):
        with pytest.raises(ValueError, match=r"Expected axis .*Received: axis="):
            call(x, axis)


def test_axes_are_counted_from_both_ends():
    assert [checked_axis(np.zeros((2, 3)), axis) for axis in (-2, -1, 0, 1)] == [0, 1, 0, 1]


def test_values_of_more_replicas_are_refused(strategy):
    value = PerReplica((1, 2))
    for call in (
        lambda: strategy.run(lambda x: x, args=({"x": [value]},)),
        lambda: strategy.reduce("SUM", value, axis=None),
        lambda: strategy.gather(value, axis=0),
        lambda: strategy.extended.reduce_to("SUM", value, value),
    ):
        with pytest.raises(ValueError, match=r"Expected values of .*1 replica.*Received: .*2 comp"):
            call()


def test_values_from_a_function(strategy):
    assert strategy.distribute_values_from_function(lambda c: c.num_replicas_in_sync) == 1
    assert strategy.local_results(5) == (5,)
    assert strategy.local_results({"a": [1, 2]}) == ({"a": [1, 2]},)


def test_extended(strategy):
    extended = strategy.extended
    assert extended.worker_devices == extended.parameter_devices == ()
    pairs = [(1.0, None), (PerReplica((2.0,)), None)]
    assert extended.batch_reduce_to("MEAN", pairs, CommunicationOptions()) == [1.0, 2.0]
    assert extended.broadcast_to(3.0, None) == 3.0
    assert extended.update([1], lambda v, x: [*v, x], args=(2,)) == [1, 2]
    assert extended.update([1], lambda v: v, group=False) == [[1]]
    assert extended.call_for_each_replica(lambda x: x, args=[4]) == 4
    with extended.colocate_vars_with(None):
        assert scopes.in_cross_replica_context()


def test_the_runner_computes_in_its_placement():
    entered = []

    class Placement:
        def __enter__(self):
            entered.append(True)

        def __exit__(self, *error):
            entered.append(False)

    runner = SoleRunner(Placement)
    runner.run(Strategy(None), lambda: entered.append("run"), (), {})
    assert entered == [True, "run", False]


class TestLosses:
    def test_the_mean_over_the_global_batch(self):
        losses = np.array([[1.0, 3.0], [5.0, 7.0]])
        assert float(compute_average_loss(losses)) == 8.0  # an example's loss is its row's sum
        assert float(compute_average_loss(losses, global_batch_size=4)) == 4.0
        assert float(compute_average_loss(losses, sample_weight=np.array([1.0, 0.0]))) == 2.0

    def test_a_loss_that_does_not_depend_on_the_batch(self):
        assert float(scale_regularization_loss([np.array(1.0), np.array([2.0, 3.0])])) == 6.0

    def test_in_cross_replica_context_they_have_no_meaning(self, strategy):
        for call in (compute_average_loss, scale_regularization_loss):
            with strategy.scope(), pytest.raises(ScopeError, match=r"in replica context.*Received"):
                call(np.array([1.0]))

    @pytest.mark.parametrize("size", [-2, 1.5])
    def test_a_number_of_examples_is_an_integer(self, size):
        with pytest.raises(ValueError, match=r"an integer.*Received: global_batch_size="):
            compute_average_loss(np.array([1.0]), global_batch_size=size)


USER_CLASS = """
import gc, weakref, keras, numpy as np, kerasdist as kd

strategy = kd.MirroredStrategy(["cpu:0", "cpu:1"])

def used():
    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(1)

        def call(self, x):
            return self.dense(x)

    with strategy.scope():
        model = Own()
        model.compile("sgd", "mse")
    model.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0)
    return weakref.ref(Own), weakref.ref(type(model)), weakref.ref(model)

references = used()
keras.utils.clear_session(free_memory=False)
gc.collect()
print([one() for one in references])
"""


@pytest.mark.parametrize("backend", ["tensorflow", "jax", "torch"])
def test_defect_21_a_users_class_goes_with_its_last_model(backend):
    said = run_fresh(USER_CLASS, KERAS_BACKEND=backend, **values(CPU_DEVICES))
    assert said.strip().endswith("[None, None, None]")
