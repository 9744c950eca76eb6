"""`ReplicaContext`: who a replica is, and merge calls."""

import numpy as np

from tests.conformance.lazy import kd, keras, ops
from tests.conformance.models import largest_error
from tests.facade.case import case
from tests.facade.lab import numbered, variable_of


@case(replicas=(1, 2, 3, 4))
def who_a_replica_is(lab, strategy):
    """A replica context has the replica's number, the number of replicas and the strategy."""
    seen = []

    def step():
        here = kd.get_replica_context()
        seen.append((here.num_replicas_in_sync, here.strategy is strategy, here.local_batch))
        lab.check(isinstance(here, kd.ReplicaContext), "a ReplicaContext")
        return here.replica_id_in_sync_group

    ids = strategy.run(step)
    lab.check(lab.replicas == 1 or isinstance(ids, kd.PerReplica), f"received {type(ids)}")
    lab.equal(list(range(lab.replicas)), [int(one) for one in strategy.local_results(ids)])
    lab.check(all(one == (lab.replicas, True, None) for one in seen), f"received {seen}")


@case
def the_context_is_found_everywhere(lab, strategy):
    """Layers, metrics and differentiated functions find their replica's context."""
    total = lambda given, value: given.reduce("SUM", value, axis=None)  # noqa: E731

    class Summed(keras.layers.Layer):
        def call(self, x):
            here = kd.get_replica_context()
            number = ops.cast(here.replica_id_in_sync_group, x.dtype)
            return here.merge_call(total, args=(x,)) + number

    class Communicating(keras.metrics.Metric):
        def __init__(self):
            super().__init__(name="communicating")
            self.seen = self.add_variable((), "zeros", name="seen")

        def update_state(self, values):
            here = kd.get_replica_context()
            self.seen.assign_add(here.all_reduce("SUM", ops.sum(values)))

        def result(self):
            return self.seen + 0.0

    with strategy.scope():
        layer, metric, weight = Summed(), Communicating(), keras.Variable(2.0)

    def step(x):
        def inner(value):
            return kd.get_replica_context().merge_call(total, args=(value,))

        def loss():
            return weight * ops.cast(kd.get_replica_context().replica_id_in_sync_group, "float32")

        metric.update_state(x)
        _, [gradient] = kd.value_and_grad(loss, [weight])
        return inner(layer(x) + x), gradient

    value = numbered(strategy, lambda i: np.float32([1.0 + i]))
    outputs, gradients = strategy.run(step, args=(value,))
    # The layer: 3 and 4; with their own: 4 and 6.
    lab.equal([[10.0], [10.0]], lab.components(outputs, strategy))
    lab.equal([0.0, 1.0], lab.components(gradients, strategy))
    with strategy.scope():
        lab.equal(6.0, metric.result())  # both replicas add the sum over both


@case
def a_context_is_a_context_manager(lab, strategy):
    """A replica context can be used in a `with` statement."""

    def step():
        here = kd.get_replica_context()
        with here as entered, here:
            inside = entered is here and kd.get_replica_context() is here
        after = kd.get_replica_context() is here
        return 1.0 if inside and after and not kd.in_cross_replica_context() else 0.0

    lab.equal({1.0}, {float(one) for one in lab.components(strategy.run(step), strategy)})
    default = kd.get_replica_context()
    with default:
        lab.check(kd.get_replica_context() is default, "the default strategy's, too")
    lab.still_usable(strategy)


@case
def a_metric_of_a_model_in_a_loop(lab, strategy):
    """A metric whose state is a maximum is right in a custom loop after `fit`."""

    with strategy.scope():
        metric = largest_error("highest")
        dense = keras.layers.Dense(1, kernel_initializer="zeros")
        model = keras.Sequential([keras.Input((1,)), dense])
        model.compile("sgd", "mse", metrics=[metric])
    x = np.ones((4, 1), "float32")
    history = model.fit(x, np.float32([[1.0], [2.0], [7.0], [4.0]]), verbose=0).history
    lab.equal([7.0], history["highest"])
    metric.reset_state()
    targets = numbered(strategy, lambda i: np.float32([[3.0 + i]]))
    strategy.run(lambda y: metric.update_state(y, 0.0 * y), args=(targets,))
    lab.equal(4.0, metric.result())


@case(replicas=(2, 3))
def merge_calls(lab, strategy):
    """`merge_call` calls its function once, in cross-replica context, with distributed values."""
    calls = []

    def merge(given, value, *, more):
        calls.append((given is strategy, kd.in_cross_replica_context(), kd.get_strategy()))
        lab.check(kd.get_replica_context() is None, "a merge call is cross-replica code")
        lab.check(isinstance(value, kd.PerReplica), f"a PerReplica, received {type(value)}")
        return given.reduce("SUM", value, axis=None) + more

    def step():
        here = kd.get_replica_context()
        value = ops.cast(here.replica_id_in_sync_group, "float32") + 1.0
        total = here.merge_call(merge, args=(value,), kwargs={"more": 10.0})
        lab.check(kd.get_replica_context() is here, "the replica's context is back")
        return total + value

    n = lab.replicas
    expected = [n * (n + 1) / 2 + 10 + i + 1 for i in range(n)]
    lab.equal(expected, lab.components(strategy.run(step), strategy))
    # Once for all replicas; JAX may trace a program twice.
    lab.check(len(calls) <= (2 if lab.backend == "jax" else 1), f"called {len(calls)} times")
    with strategy.scope():  # by its name in V1
        again = strategy.extended.call_for_each_replica(step)
    lab.equal(expected, lab.components(again, strategy))
    lab.equal({(True, True)}, {one[:2] for one in calls})
    lab.check(calls[0][2] is strategy, "the strategy is in force")


@case
def merge_calls_return_each_its_component(lab, strategy):
    """`merge_call` returns to each replica its component of a distributed value."""

    def merge(given, value):
        doubled = [one * 2.0 for one in given.local_results(value)]
        turned = numbered(given, lambda i: doubled[1 - i])
        return {"turned": turned, "all": 7.0}

    def step(x):
        result = kd.get_replica_context().merge_call(merge, args=(x,))
        return result["turned"] + result["all"]

    value = numbered(strategy, lambda i: ops.convert_to_tensor(1.0 + i))
    lab.equal([11.0, 9.0], lab.components(strategy.run(step, args=(value,)), strategy))


@case
def a_run_in_a_merge_call(lab, strategy):
    """In a merge call, `run` runs a function in each replica, which may call collectives."""
    variable = variable_of(strategy, 0.0, aggregation="sum")

    def inner(x, factor):
        here = kd.get_replica_context()
        lab.check(here.strategy is strategy and not kd.in_cross_replica_context(), "in a replica")
        variable.assign(x)
        return here.all_reduce("SUM", x) + x * factor

    def merge(given, x):
        inside = given.run(inner, args=(x,), kwargs={"factor": 10.0})
        lab.check(kd.get_replica_context() is None, "cross-replica code again")
        return inside, given.reduce("SUM", inside, axis=None)

    def step(x):
        own, total = kd.get_replica_context().merge_call(merge, args=(x,))
        return own, total, variable + x

    value = numbered(strategy, lambda i: np.float32(1.0 + i))
    for run in (strategy.run, kd.function(strategy.run)):
        own, total, after = run(step, args=(value,))
        lab.equal([13.0, 23.0], lab.components(own, strategy))
        lab.equal([36.0, 36.0], lab.components(total, strategy))
        lab.equal([4.0, 5.0], lab.components(after, strategy))
    lab.still_usable(strategy)


@case
def another_replicas_context_is_refused(lab, strategy):
    """Methods of a replica context are refused where the context is not in force."""
    default = kd.get_replica_context()

    def step():
        return default.all_reduce("SUM", ops.ones(()))

    with lab.raises(RuntimeError, "Expected all_reduce on the context of the replica that.*Receiv"):
        strategy.run(step)
    lab.still_usable(strategy)
    with strategy.scope(), lab.raises(RuntimeError, "Expected merge_call on the context.*Received"):
        default.merge_call(lambda given: None)


@case
def the_default_strategys_context(lab):
    """Outside of scopes, collectives have one replica; `merge_call` calls its function."""
    here = kd.get_replica_context()
    seen = []

    def merge(strategy, value, more):
        seen.append((strategy is kd.get_strategy(), kd.in_cross_replica_context()))
        return value + more

    lab.equal(3, here.merge_call(merge, args=(1,), kwargs={"more": 2}))
    lab.equal([(True, True)], seen)
    lab.equal((0, 1), (here.replica_id_in_sync_group, here.num_replicas_in_sync))
    x = ops.convert_to_tensor([1.0, 2.0])
    lab.equal([1.0, 2.0], here.all_reduce("MEAN", x))
    lab.equal([1.0, 2.0], here.all_gather(x, axis=-1))
    lab.equal({"a": [1.0, 2.0]}, here.all_reduce("SUM", {"a": x}))
