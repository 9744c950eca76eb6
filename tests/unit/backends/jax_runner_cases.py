"""What is JAX's own in custom loops; run by test_jax_runner.py in a process of its own."""

import gc
import json
import traceback
import weakref

import jax
import keras
import numpy as np
import pytest
from keras import ops

import kerasdist as kd
from kerasdist.functions import function, value_and_grad
from kerasdist.losses import compute_average_loss
from kerasdist.values import Mirrored, PerReplica

REPLICAS = 2
CASES = {}


def case(test):
    CASES[test.__name__] = test
    return test


def index():
    return kd.get_replica_context().replica_id_in_sync_group


def numbered(strategy, dtype="float32"):
    return strategy.distribute_values_from_function(
        lambda at: np.full((2,), at.replica_id_in_sync_group + 1, dtype)
    )


def components(strategy, value):
    return [np.asarray(one) for one in strategy.local_results(value)]


@case
def a_function_is_traced_once_for_a_form_of_its_arguments(strategy):
    traced = []
    with strategy.scope():
        metric = keras.metrics.Mean()

    def add(x):
        traced.append(x)
        metric.update_state(x)
        return x + 1

    for _ in range(4):
        strategy.run(add, args=(np.ones(2, "float32"),))
    assert len(traced) == 2  # once to find the variables, once to compile
    metric.reset_state()
    value = strategy.run(add, args=(np.ones(2, "float32"),))
    assert len(traced) == 2
    for _ in range(4):
        value = strategy.run(add, args=(value,))
    assert len(traced) == 4  # divided now, as its results stay


@case
def a_bound_method_is_traced_once(strategy):
    class Loop:
        traced = 0

        def step(self, x):
            self.traced += 1
            return x * 2

    loop = Loop()
    for _ in range(4):
        strategy.run(loop.step, args=(np.ones(2, "float32"),))
    assert loop.traced == 2


@case
def a_function_that_is_gone_leaves_nothing_behind(strategy):
    def run_once():
        large = np.ones(1000, "float32")

        def add():
            return ops.sum(large) + index()

        strategy.run(add)
        return weakref.ref(add)

    gone = run_once()
    gc.collect()
    assert gone() is None


@case
def what_a_step_writes_is_consumed_and_what_others_hold_is_not(strategy):
    with strategy.scope():
        variable = keras.Variable(np.ones(300, "float32"), aggregation="mean")
        target = keras.Variable(np.zeros(300, "float32"))
    step = function(lambda: strategy.run(lambda: variable.assign(variable + 1.0) is None))
    step()
    before = pointers(variable)
    step()
    assert pointers(variable) == before  # in place
    target.assign(variable.value)  # one array, two variables
    held = variable.value
    for _ in range(3):
        step()
    assert float(variable.value[0]) == 6.0
    np.testing.assert_array_equal(held, target.value)
    copying = function(lambda: target.assign(variable.value))
    copying()
    step()
    assert (float(target.value[0]), float(variable.value[0])) == (6.0, 7.0)


def pointers(variable):
    return {shard.data.unsafe_buffer_pointer() for shard in variable.value.addressable_shards}


@case
def per_replica_values_stay_on_the_devices(strategy):
    value = numbered(strategy)
    array = value.source.array
    assert array.shape == (REPLICAS, 2)
    assert {str(one.device) for one in array.addressable_shards} == {
        str(device) for device in jax.devices()[:REPLICAS]
    }
    with jax.transfer_guard("disallow_explicit"):
        for _ in range(2):
            value = strategy.run(lambda x: x, args=(value,))
    assert [next(iter(one.devices())).id for one in value.values] == list(range(REPLICAS))
    assert [one.shape for one in value.values] == [(2,)] * REPLICAS


@case
def arrays_of_a_batch_enter_together_and_come_out_apart(strategy):
    rng = np.random.default_rng(0)
    batch = {
        "x": rng.normal(size=(4, 3, 2)).astype("float32"),
        "double": rng.normal(size=(4, 1)),
        "n": rng.integers(9, size=4).astype("int32"),
        "rest": [rng.integers(9, size=(4, 2)).astype("int32"), rng.normal(size=(4, 5))],
        "large": rng.normal(size=(4, 4096)).astype("float32"),
    }
    expected = jax.tree.map(np.array, batch)

    @function
    def whole(batch):
        return strategy.gather(strategy.run(lambda x: x, args=(batch,)), axis=0)

    for used in (batch, {"n": batch["n"]}, batch["rest"]):  # the second leaves a place empty
        [divided] = strategy.distribute_dataset([used])
        part = strategy.local_results(divided)[1]
        for leaf, found in zip(jax.tree.leaves(used), jax.tree.leaves(part), strict=True):
            np.testing.assert_allclose(found, leaf[2:], rtol=1e-6)
        assert jax.tree.structure(whole(divided)) == jax.tree.structure(used)
    [divided] = strategy.distribute_dataset([batch])
    for leaf in jax.tree.leaves(batch):
        leaf[:] = 0  # what waits for a program is a copy
    some = {"rest": divided["rest"][1], "again": divided["rest"][1], "double": divided["double"]}
    found = whole(some)
    np.testing.assert_allclose(found["rest"], expected["rest"][1], rtol=1e-6)
    np.testing.assert_allclose(found["again"], expected["rest"][1], rtol=1e-6)
    np.testing.assert_allclose(found["double"], expected["double"], rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), whole(divided), expected)


@case
def batches_of_one_form_are_compiled_for_once(strategy):
    traces = []

    @function
    def total(batch):
        traces.append(batch)
        x, y = batch
        return strategy.reduce("SUM", strategy.run(lambda x, y: x.sum() + y.sum(), (x, y)), None)

    batches = [(np.full((4, 2), n, "float32"), np.full(4, n, "float32")) for n in range(3)]
    found = [float(total(batch)) for batch in strategy.distribute_dataset(batches)]
    assert found == [0.0, 12.0, 24.0]
    once = len(traces)
    wider = [(np.ones((4, 3), "float32"), np.ones(4, "float32"))]
    assert [float(total(batch)) for batch in strategy.distribute_dataset(wider)] == [16.0]
    assert len(traces) > once
    again = [float(total(batch)) for batch in strategy.distribute_dataset(batches)]
    assert again == found
    assert len(traces) == 2 * once


@case
def distributed_values_are_pytrees(strategy):
    value = numbered(strategy)
    doubled = jax.tree.map(lambda x: x * 2, value)
    assert isinstance(doubled, PerReplica)
    np.testing.assert_array_equal(components(strategy, doubled)[1], [4, 4])
    passed = jax.jit(lambda x: x)(value)
    np.testing.assert_array_equal(components(strategy, passed)[1], [2, 2])
    total = strategy.extended.reduce_to("SUM", value, value)
    same, other = function(lambda x, y: (x, y))(value, total)
    assert isinstance(same, PerReplica)
    assert isinstance(other, Mirrored)
    np.testing.assert_array_equal(components(strategy, other)[1], [3, 3])


@case
def components_persist_until_somebody_assigns(strategy):
    with strategy.scope():
        read = keras.Variable(0.0, synchronization="on_read", aggregation="sum")
        free = keras.Variable(0.0, trainable=False)

    def add(x):
        read.assign_add(x[0])
        free.assign(x[0])
        return read + 0.0, free + 0.0

    for _ in range(2):
        both = strategy.run(add, args=(numbered(strategy),))
    assert components(strategy, both[0]) == [2.0, 4.0]
    assert components(strategy, both[1]) == [1.0, 2.0]
    assert float(read.value) == 6.0
    assert float(free.value) == 1.0
    looked_at = strategy.run(lambda: (read + 0.0, free + 0.0))
    assert components(strategy, looked_at[0]) == [2.0, 4.0]
    assert components(strategy, looked_at[1]) == [1.0, 2.0]
    read.assign(10.0)
    free.assign(3.0)
    looked_at = strategy.run(lambda: (read + 0.0, free + 0.0))
    assert components(strategy, looked_at[0]) == [5.0, 5.0]
    assert components(strategy, looked_at[1]) == [3.0, 3.0]


def trained(strategy, sizes, features=3):
    """The weights and states of a model after a custom loop, lazily built in it."""
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential([keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)])
        optimizer = keras.optimizers.Adam(0.05, global_clipnorm=0.5)
        metric = keras.metrics.MeanSquaredError()

    def replica_step(x, y, size):
        if not model.built:
            model.build((None, features))

        def loss():
            predicted = model(x, training=True)
            metric.update_state(y, predicted)
            errors = keras.losses.mean_squared_error(y, predicted)
            return compute_average_loss(errors, global_batch_size=size)

        value, gradients = value_and_grad(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        return value

    @function
    def step(batch, size):
        values = strategy.run(replica_step, args=(*batch, size))
        return strategy.reduce("SUM", values, axis=None)

    draws = np.random.default_rng(0)
    batches = [draws.normal(size=(size, features)).astype("float32") for size in sizes]
    pairs = [(x, x.sum(axis=1, keepdims=True)) for x in batches]
    losses = [
        float(step(batch, np.int32(size)))
        for batch, size in zip(strategy.distribute_dataset(pairs), sizes, strict=True)
    ]
    assert int(optimizer.iterations) == len(sizes)
    return losses, [*model.weights, *optimizer.variables], float(metric.result())


def compare(found, expected):
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
    for one, other in zip(found[1], expected[1], strict=True):
        np.testing.assert_allclose(one, other, atol=2e-6, err_msg=one.path)
    assert abs(found[2] - expected[2]) < 1e-5 * expected[2]


@case
def a_custom_loop_gives_the_numbers_of_one_device(strategy):
    sizes = [12, 12, 12]
    expected = trained(kd.OneDeviceStrategy("cpu:0"), sizes)
    for count in (2, 3, 4):
        several = kd.MirroredStrategy([f"cpu:{i}" for i in range(count)])
        compare(trained(several, sizes), expected)


@case
def so_it_does_where_batches_are_ragged_or_smaller_than_the_number_of_replicas(strategy):
    sizes = [12, 7, 1, 5, 7]
    expected = trained(kd.OneDeviceStrategy("cpu:0"), sizes)
    for count in (2, 3, 4):
        several = kd.MirroredStrategy([f"cpu:{i}" for i in range(count)])
        compare(trained(several, sizes), expected)


@case
def gradients_through_collectives_are_those_of_finite_differences(strategy):
    rows = strategy.distribute_values_from_function(
        lambda at: np.linspace(0.5, 1.5, 2 + at.replica_id_in_sync_group, dtype="float32")
    )
    weights = np.array([0.7], "float32")
    with strategy.scope():
        variable = keras.Variable(weights)

    def loss(x):
        here = kd.get_replica_context()
        scale = ops.cast(index() + 1, "float32")
        total = here.all_reduce("SUM", ops.sum(ops.sin(x * variable.value)))
        everyone = here.all_gather(ops.square(x * variable.value), axis=0)
        return scale * (total**2 + ops.sum(everyone**2))

    def step(x):
        value, [gradient] = value_and_grad(lambda: loss(x), [variable])
        return value, kd.get_replica_context().all_reduce("SUM", gradient)

    def whole(scale):
        variable.assign(weights + scale)
        values = strategy.run(lambda x: loss(x), args=(rows,))  # noqa: PLW0108
        return float(strategy.reduce("SUM", values, axis=None))

    _, gradient = strategy.run(step, args=(rows,))
    slope = (whole(1e-2) - whole(-1e-2)) / 2e-2
    np.testing.assert_allclose(components(strategy, gradient), [[slope]] * REPLICAS, rtol=2e-3)


@case
def an_exception_while_tracing_changes_nothing(strategy):
    with strategy.scope():
        variable = keras.Variable(1.0, aggregation="sum")

    def fails():
        variable.assign(5.0)
        raise KeyError("mine")

    def branches():
        variable.assign(5.0)
        return 1 if variable.value > 0 else 2

    for function_of_replica, kind in (
        (fails, KeyError),
        (branches, jax.errors.TracerBoolConversionError),
    ):
        with pytest.raises(kind):
            strategy.run(function_of_replica)
        assert float(variable.value) == 1.0
        assert components(strategy, strategy.run(index)) == [0, 1]


@case
def keras_scopes_inside_of_a_step_see_its_variables(strategy):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    x = np.ones((2, 3), "float32")
    kernel = model.trainable_variables[0]
    bias = model.trainable_variables[1]

    @function
    def inside(x):
        with keras.StatelessScope(state_mapping=[(kernel, ops.zeros((3, 2)))]):
            return model(x)

    np.testing.assert_array_equal(inside(x), np.zeros((2, 2)))
    bias.assign([1.0, 2.0])  # not a constant of the compiled step
    np.testing.assert_array_equal(inside(x), [[1.0, 2.0]] * 2)


@case
def a_function_that_makes_variables_in_every_call_is_refused(strategy):
    def step():
        return keras.Variable(ops.ones, shape=(2,), dtype="float32") * 1.0

    with pytest.raises(ValueError, match="creates its variables in its first call only"):
        strategy.run(step)


@case
def an_optimizer_that_scales_the_loss_works_in_a_step(strategy):
    def scales(strategy):
        keras.utils.set_random_seed(1)
        with strategy.scope():
            model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
            inner = keras.optimizers.Adam(0.01)
            optimizer = keras.optimizers.LossScaleOptimizer(inner, dynamic_growth_steps=2)

        def replica_step(x):
            def loss():
                squares = ops.square(model(x)[:, 0])
                return optimizer.scale_loss(compute_average_loss(squares, global_batch_size=4))

            _, gradients = value_and_grad(loss, model.trainable_variables)
            optimizer.apply(gradients, model.trainable_variables)

        step = function(lambda x: strategy.run(replica_step, args=(x,)))
        found = []
        for factor in (1.0, 1.0, np.nan, 1.0):
            for batch in strategy.distribute_dataset([np.full((4, 3), factor, "float32")]):
                step(batch)
            found.append(float(optimizer.dynamic_scale.value))
        return found, model.get_weights(), int(inner.iterations)

    found, expected = scales(strategy), scales(kd.OneDeviceStrategy("cpu:0"))
    assert found[0] == expected[0] == [2.0**15, 2.0**16, 2.0**15, 2.0**15]
    assert found[2] == expected[2] == 3
    for one, other in zip(found[1], expected[1], strict=True):
        np.testing.assert_allclose(one, other, atol=2e-6)


@case
def a_function_stays_on_the_device_of_its_strategy(strategy):
    alone = kd.OneDeviceStrategy("cpu:1")
    with alone.scope():
        variable = keras.Variable(1.0)
    step = function(lambda: alone.run(lambda: variable.assign_add(1.0)))
    assert step().devices() == variable.value.devices() == {jax.devices()[1]}


def main():
    kd.config.set_logical_cpu_devices(4)
    failures = {}
    for name, test in CASES.items():
        try:
            test(kd.MirroredStrategy([f"cpu:{i}" for i in range(REPLICAS)]))
        except BaseException:  # noqa: BLE001  whatever it is, the others run
            failures[name] = traceback.format_exc()
    print(json.dumps(failures))


if __name__ == "__main__":
    main()
