"""``strategy.extended``."""

from tests.facade.case import case
from tests.facade.lazy import kd, keras, ops


@case
def distribute_lib__StrategyExtendedV2_colocate_vars_with__1(lab):
    """Variables beside another, updated with them."""
    strategy = lab.strategy()
    with strategy.scope():
        first = keras.Variable(1.0)
        with strategy.extended.colocate_vars_with(first):
            second, third = keras.Variable(2.0), keras.Variable(3.0)
        strategy.extended.update(
            first, lambda v1, v2, v3: v1.assign(v2 * 10.0 + v3), args=(second, third)
        )
    lab.equal([23.0, 23.0], lab.components(first, strategy))


@case
def distribute_lib__StrategyExtendedV2_update__2(lab):
    """An update calls its function for each copy, with that copy's components."""
    strategy = lab.strategy()
    with strategy.scope():
        variable = keras.Variable(1.0)
        value = strategy.extended.reduce_to("SUM", ops.convert_to_tensor(4.0), variable)
        found = strategy.extended.update(
            variable, lambda v, x, y: v + x + y, args=(value,), kwargs={"y": 0.5}, group=False
        )
    lab.check(isinstance(found, list), "a list, one a copy")
    lab.equal({9.5}, {float(one) for one in lab.numpy(found)})


@case
def distribute_lib__StrategyExtendedV1_call_for_each_replica__1(lab):
    """A merge call sums over the replicas, whose own results differ."""
    strategy = lab.strategy()

    def merge(strategy, value):
        return sum(strategy.experimental_local_results(value))

    def step(three):
        here = kd.get_replica_context()
        v = three + here.replica_id_in_sync_group
        return here.merge_call(merge, args=(v,)) + v

    with strategy.scope():
        merged = strategy.run(step, args=[3])
        lab.equal([10, 11], lab.components(merged, strategy))
        merged = strategy.extended.call_for_each_replica(step, args=[3])
        lab.equal([10, 11], lab.components(merged, strategy))
