"""Which strategy is in force, and whose code this is."""

from tests.facade.case import case
from tests.facade.lazy import kd, keras, ops


@case
def distribute_lib__get_replica_context__1(lab):
    """There is a replica context outside of scopes and in `run`, none in a scope."""
    strategy = lab.strategy()
    lab.check(kd.get_replica_context() is not None, "the default strategy's is missing")

    def step():
        here = kd.get_replica_context()
        lab.check(here is not None, "none in run")
        return ops.convert_to_tensor(here.replica_id_in_sync_group), here.num_replicas_in_sync

    with strategy.scope():
        lab.check(kd.get_replica_context() is None, "a scope is cross-replica code")
        ids, counts = strategy.run(step)
    lab.equal([0, 1], lab.components(ids, strategy))
    lab.equal({2}, {int(one) for one in lab.components(counts, strategy)})


@case
def distribute_lib__in_cross_replica_context__1(lab):
    """Only the code of a scope is cross-replica code."""
    strategy = lab.strategy()
    seen = [kd.in_cross_replica_context()]
    with strategy.scope():
        seen.append(kd.in_cross_replica_context())
        strategy.run(lambda: seen.append(kd.in_cross_replica_context()))
    lab.equal([False, True, False], seen[:3])
    lab.check(not any(seen[2:]), "a replica's code was said to be cross-replica code")


@case
def distribute_lib__get_strategy__1(lab):
    """Cross-replica code finds its strategy."""
    strategy = lab.strategy()
    with strategy.scope():
        lab.check(kd.in_cross_replica_context(), "a scope is cross-replica code")
        lab.check(kd.get_strategy() is strategy, "another strategy is said to be in force")
    lab.check(kd.get_strategy() is not strategy, "the scope has ended")


@case
def distribute_lib__has_strategy__1(lab):
    """A strategy is in force in its scope alone."""
    lab.check(not kd.has_strategy(), "outside")
    with lab.strategy().scope():
        lab.check(kd.has_strategy(), "inside")
    lab.check(not kd.has_strategy(), "afterwards")


@case
def distribute_lib__experimental_set_strategy__2(lab):
    """Scopes of two strategies one after the other, then none."""
    first, second = lab.strategy(), lab.strategy(3)
    found = []
    for strategy in (first, second):
        with strategy.scope():
            found.append(kd.get_strategy().num_replicas_in_sync)
    found.append(kd.get_strategy().num_replicas_in_sync)
    lab.equal([2, 3, 1], found)


@case
def distribute_lib__StrategyBase_scope__1(lab):
    """A variable made in the scope has a component a replica, one made outside has one."""
    strategy = lab.strategy()
    with strategy.scope():
        mirrored = keras.Variable(1.0)
    regular = keras.Variable(1.0)
    lab.equal([1.0, 1.0], lab.components(mirrored, strategy))
    lab.equal(1.0, regular)
    lab.check(strategy.extended.variable_created_in_scope(mirrored), "it belongs to the strategy")
    lab.check(not strategy.extended.variable_created_in_scope(regular), "it belongs to none")


@case
def mirrored_strategy__MirroredStrategy__1(lab):
    """A variable made in the scope is mirrored."""
    strategy = lab.strategy()
    with strategy.scope():
        x = keras.Variable(1.0)
    lab.equal([1.0, 1.0], lab.components(x, strategy))


@case
def mirrored_strategy__MirroredStrategy__2(lab):
    """A variable made lazily by a function that the scope calls is mirrored."""
    made = []

    def variable():
        if not made:
            made.append(keras.Variable(1.0))
        return made[0]

    strategy = lab.strategy()
    with strategy.scope():
        variable()
        variable()
    lab.equal(1, len(made))
    lab.equal([1.0, 1.0], lab.components(made[0], strategy))


@case
def distribute_lib__variable_sync_on_read_context__1(lab):
    """A variable that is synchronised on reading: a replica reads its own component.

    The sum, which TensorFlow's internal context has a replica read, is what cross-replica code
    reads.
    """
    strategy = lab.strategy()
    with strategy.scope():
        v = keras.Variable(0.0, trainable=False, synchronization="on_read", aggregation="sum")

    def step():
        v.assign(ops.convert_to_tensor(1.0))
        return v + 10.0

    lab.equal([11.0, 11.0], lab.components(strategy.run(step), strategy))
    with strategy.scope():
        lab.equal(12.0, strategy.extended.read_var(v) + 10.0)


@case
def one_device_strategy__OneDeviceStrategy__1(lab):
    """One device: what `run` returns is a plain value, to compute with."""
    strategy = kd.OneDeviceStrategy("cpu:0")
    with strategy.scope():
        v = keras.Variable(1.0)
    lab.check(strategy.extended.variable_created_in_scope(v), "the variable is the strategy's")
    result = 0
    for i in range(10):
        result += strategy.run(lambda x: x * 2, args=(i,))
    lab.equal(90, result)


@case
def one_device_strategy__OneDeviceStrategy_reduce__1(lab):
    """With one replica a reduction is over the axis alone."""
    strategy = kd.OneDeviceStrategy("cpu:0")
    t = ops.arange(10)
    lab.equal(list(range(10)), strategy.reduce("SUM", t, axis=None))
    lab.equal(45, strategy.reduce("SUM", t, axis=0))
