"""Programs: what is traced and compiled, and when; what becomes of their arrays."""

import gc
import os
import signal
import threading
import types
import weakref
from unittest import mock

import numpy as np
import pytest

from tests.conformance.lazy import LazyModule, jax, kd, keras, ops
from tests.facade.case import of_backend
from tests.facade.lab import variable_of

keras_compat = LazyModule("kerasdist.keras_compat")
mesh = LazyModule("kerasdist.backends.jax.mesh.layout")
placement = LazyModule("kerasdist.backends.jax.mesh.placement")
case = of_backend("jax")


def index():
    return kd.get_replica_context().replica_id_in_sync_group


def components(strategy, value):
    return [np.asarray(one) for one in strategy.local_results(value)]


@case
def a_function_keeps_no_model_alive(strategy):
    """Up to 128 programs were kept, with their models."""

    @kd.function
    def step(model, x):
        return strategy.reduce("SUM", strategy.run(lambda x: ops.sum(model(x)), args=(x,)), None)

    def used():
        with strategy.scope():
            model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        large = np.ones(1000, "float32")

        def add():
            return ops.sum(large) + index()

        for _ in range(2):
            step(model, np.ones((3, 2), "float32"))
            strategy.run(add)
        return weakref.ref(model), weakref.ref(model.weights[0]), weakref.ref(add)

    found = [used() for _ in range(3)]
    keras.utils.clear_session(free_memory=False)
    gc.collect()
    assert [one() for each in found for one in each] == [None] * 9


@case
def a_compiled_version_goes_with_its_strategy(strategy):
    """Another strategy may get its place in memory, and ran on its devices."""
    from kerasdist.backends.jax.loops.functions import Program

    def versions():
        gc.collect()
        programs = [one for one in gc.get_objects() if type(one) is Program]
        return sum(len(one._executables._entries) for one in programs)

    step = kd.function(lambda x: x + 1.0)

    def used():
        with kd.MirroredStrategy(["cpu:0"]).scope():
            step(ops.ones((3,)))

    before = versions()
    used()
    assert versions() == before


@case
def a_program_goes_with_its_method(strategy):
    """A function set as an object's method may lie where one lay that is gone."""
    holder = types.SimpleNamespace()
    for factor in range(1, 60):
        made = {}
        exec(f"def step(holder, x):\n    return x * {factor}.0", made)
        holder.step = types.MethodType(made.pop("step"), holder)
        found = strategy.run(holder.step, args=(ops.ones(()),))
        assert components(strategy, found)[0] == factor


@case
def the_program_that_was_used_least_lately_goes_first(strategy):
    """The oldest went, also one that each step uses."""
    traced = []

    @kd.function
    def step(number):
        traced.append(number)
        return number + 0

    step(-1)
    for number in range(200):
        step(number)
        step(-1)
    assert traced.count(-1) == 1


@case
def a_lambda_in_a_loop_is_traced_once(strategy):
    """Each iteration compiled anew, since each makes another function."""
    traced, scale = [], np.ones(2, "float32")

    def note(factor):
        traced.append(factor)

    def looped(factor):
        def add(x, more=1.0):
            note(factor)
            return x * factor * scale + more

        return strategy.run(add, args=(np.ones(2, "float32"),))

    for _ in range(4):
        [first, *_] = components(strategy, looped(2.0))
        np.testing.assert_array_equal(first, [3.0, 3.0])
    assert traced == [2.0] * 2
    np.testing.assert_array_equal(components(strategy, looped(3.0))[0], [4.0, 4.0])
    assert traced == [2.0] * 2 + [3.0] * 2
    scale = np.full(2, 5.0, "float32")  # another array
    np.testing.assert_array_equal(components(strategy, looped(2.0))[0], [11.0, 11.0])


FACTOR = 1.0


@case
def a_lambda_sees_the_globals_of_its_call(strategy):
    """Lambdas of one code shared a program by what they close over, whatever their globals were."""
    for factor in (2.0, np.full(2, 3.0, "float32"), 2.0, [4.0, 4.0]):
        with mock.patch(f"{__name__}.FACTOR", factor):
            alone = strategy.run(lambda: ops.ones(2) * ops.convert_to_tensor(FACTOR))
            nested = strategy.run(lambda: sum(ops.ones(2) * np.float32(FACTOR) for _ in "1"))
        for value in (alone, nested):
            np.testing.assert_array_equal(components(strategy, value)[1], np.ones(2) * factor)


@case
def zero_and_minus_zero_are_two_constants(strategy):
    """They shared a compiled program; NaN had a new one in each call."""
    traced = []

    @kd.function
    def inverse(x, zero):
        traced.append(zero)
        return x / zero

    one = np.float32(1.0)
    signs = [float(inverse(one, zero)) for zero in (0.0, -0.0, 0.0)]
    assert signs == [np.inf, -np.inf, np.inf]
    for _ in range(3):
        assert np.isnan(inverse(one, float("nan")))
    assert len(traced) == 3


@case
def a_strategy_that_divides_state_goes_with_its_last_reference(strategy):
    """A table of ours kept it."""
    divides = kd.MirroredStrategy(["cpu:0", "cpu:1"], sharding="full")
    with divides.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(8)])
        model.compile("adam", "mse")
    model.fit(np.ones((4, 2)), np.ones((4, 8)), verbose=0)
    gone = weakref.ref(divides.replica_set)
    del divides, model
    keras.utils.clear_session(free_memory=False)
    gc.collect()
    assert gone() is None


@case
def a_replica_of_several_devices_needs_no_cpu_device(strategy):
    """With JAX_PLATFORMS=tpu or cuda there is none, where variables were made."""
    local_devices = jax.local_devices

    def without_cpu(*args, backend=None, **kwargs):
        if backend == "cpu":
            raise RuntimeError("Unknown backend cpu")
        return local_devices(*args, backend=backend, **kwargs)

    layout = mesh.Layout(jax.devices()[:2], 2)
    with mock.patch("jax.local_devices", without_cpu):
        place = placement.Placement(layout)
        with place.variables():
            assert jax.numpy.ones(2).devices() == {jax.devices()[0]}


@case
def arrays_that_others_hold_live_on(strategy):
    """Not consumed are arrays that were read, nor those of another variable, nor an argument."""
    with strategy.scope():
        variable = keras.Variable(np.ones(300, "float32"), aggregation="mean")
        target = keras.Variable(np.zeros(300, "float32"))
    outside = keras.Variable(np.zeros(300, "float32"))
    step = kd.function(lambda: strategy.run(lambda: variable.assign(variable + 1.0) is None))
    with_argument = kd.function(lambda x: variable.assign(variable + x) is None)
    step()
    target.assign(variable.value)  # one array, three variables
    outside.assign(variable)
    held, view = variable.value, np.asarray(variable)
    with_argument(held)
    for _ in range(3):
        step()
    assert float(variable.value[0]) == 7.0
    for one in (held, view, target.value, outside.value):
        np.testing.assert_array_equal(one, np.full(300, 2.0, "float32"))
    copying = kd.function(lambda: target.assign(variable.value))
    copying()
    step()
    assert (float(target.value[0]), float(variable.value[0])) == (7.0, 8.0)


@case
def code_on_the_host_may_call_a_function(strategy):
    """It waited for ever for the step, which waited for it."""
    total = variable_of(strategy, 0.0, aggregation="mean")
    noted = set()
    double = kd.function(lambda x: x * 2)

    def on_host(x):
        noted.add(float(double(np.asarray(x))))
        return np.float32(1.0)

    def on_replica(x):
        one = jax.pure_callback(on_host, jax.ShapeDtypeStruct((), "float32"), x.sum())
        total.assign_add(one)
        return one

    step = kd.function(lambda x: strategy.reduce("SUM", strategy.run(on_replica, (x,)), None))
    watch = threading.Timer(60, lambda: os._exit(3))
    watch.start()
    for _ in range(30):
        assert float(step(np.ones((64, 64), "float32"))) == 2.0
    watch.cancel()
    assert (float(total.value), noted) == (30.0, {8192.0})


@case
def a_step_writes_new_values_over_the_old(strategy):
    """As if the variable were changed in place: at no time are there two arrays for it."""
    with strategy.scope():
        variable = keras.Variable(np.ones(300, "float32"), aggregation="mean")
        constant = keras.Variable(np.ones(300, "float32"))
    step = kd.function(lambda: strategy.run(lambda: variable.assign(variable + constant) is None))

    def places():
        stored = keras_compat.stored_value(variable)  # reading it would keep it
        return [shard.data.unsafe_buffer_pointer() for shard in stored.addressable_shards]

    step()
    before = places()
    for _ in range(3):
        step()
        assert places() == before
    held = variable.value
    step()
    assert places() != before
    assert not held.is_deleted()
    assert (float(held[0]), float(variable.value[0])) == (5.0, 6.0)


@case
def an_interrupted_step_loses_no_value(strategy):
    """Ctrl-C comes while a program runs, and the user goes on in the same process."""
    variable = variable_of(strategy, np.zeros((400, 400), "float32"), aggregation="mean")
    ones = np.ones((400, 400), "float32")

    def work():
        product = variable @ variable @ variable @ variable
        variable.assign(variable + ones + 0.0 * product)

    step = kd.function(lambda: strategy.run(work))
    step()
    steps = 1
    gc.collect()  # Python drops an interrupt that comes while a weak reference's callback runs
    for number in range(30):
        interrupter = threading.Timer(0.002 + 0.0007 * number, signal.raise_signal, [signal.SIGINT])
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            interrupter.start()
            while True:
                step()
                steps += 1
        except KeyboardInterrupt:
            pass
        finally:
            interrupter.join()
            signal.signal(signal.SIGINT, before)
        value = float(variable.value[0, 0])
        assert value in (steps, steps + 1), (value, steps)
        steps = value


@case
def a_step_that_consumed_the_state_and_failed_says_so(strategy):
    """No read waits for a value that a failed step has taken; loaded weights train again."""
    from kerasdist import keras_compat

    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        model.compile("adam", "mse")
    x, y, weights = np.ones((8, 3), "float32"), np.ones((8, 2), "float32"), model.get_weights()

    def lose(batch, logs=None):
        if batch == 1:
            for value in jax.tree.leaves(keras_compat.state_of(model)):
                value.delete()

    losing = keras.callbacks.LambdaCallback(on_train_batch_begin=lose)
    with pytest.raises(RuntimeError, match="deleted"):
        model.fit(x, y, batch_size=4, verbose=0, callbacks=[losing])
    with pytest.raises(kd.errors.StateLostError, match=r"kernel.*load_weights"):
        model.get_weights()
    with strategy.scope():
        model.compile("adam", "mse")
    model.set_weights(weights)
    model.fit(x, y, batch_size=4, verbose=0)
    assert np.all(np.isfinite(model.get_weights()[0]))


@case
def keras_scopes_inside_of_a_step_see_its_variables(strategy):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    kernel = model.trainable_variables[0]

    @kd.function
    def inside(x):
        with keras.StatelessScope(state_mapping=[(kernel, ops.zeros((3, 2)))]):
            return model(x)

    np.testing.assert_array_equal(inside(np.ones((2, 3), "float32")), np.zeros((2, 2)))


@case
def a_function_that_makes_variables_in_every_call_is_refused(strategy):
    def step():
        return keras.Variable(ops.ones, shape=(2,), dtype="float32") * 1.0

    with pytest.raises(ValueError, match="creates its variables in its first call only"):
        strategy.run(step)


@case
def a_function_stays_on_the_device_of_its_strategy(strategy):
    alone = kd.OneDeviceStrategy("cpu:1")
    variable = variable_of(alone, 1.0)
    step = kd.function(lambda: alone.run(lambda: variable.assign_add(1.0)))
    assert step().devices() == variable.value.devices() == {jax.devices()[1]}


@case
def a_function_of_strategies_on_different_devices_is_refused(strategy):
    """Also where both begin with the same device."""
    wider = kd.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"])

    @kd.function
    def both():
        return strategy.run(index), wider.run(index)

    with pytest.raises(kd.errors.ScopeError, match="to have the same devices"):
        both()


@case
def eager_programs_do_not_wait_for_each_other(strategy):
    """Hundreds of programs, of which the host waits for none, all end on few cores."""
    arrays = strategy.replica_set.arrays
    x = arrays.put(np.ones((64 * strategy.num_replicas_in_sync, 3000), "float32"), arrays.rows)
    for _ in range(600):
        x = jax.numpy.tanh(x - x.sum(0) * 1e-3)
    assert np.isfinite(np.asarray(x)).all()
