"""What a replica asks of the others."""

from tests.facade.case import case
from tests.facade.lazy import kd, keras, ops


@case
def distribute_lib__ReplicaContextBase_merge_call__1(lab):
    """The default strategy's merge_call is a call in cross-replica context."""
    here = kd.get_replica_context()
    seen = []

    def merge(strategy, value, more):
        seen.append((strategy is kd.get_strategy(), kd.in_cross_replica_context()))
        return value + more

    lab.equal(3, here.merge_call(merge, args=(1,), kwargs={"more": 2}))
    lab.equal([(True, True)], seen)


@case
def distribute_lib__ReplicaContext_all_gather__2(lab):
    """A list of tensors of other ranks, gathered in a compiled step."""
    strategy = lab.strategy()

    @kd.function
    def step():
        values = [ops.convert_to_tensor([1, 2, 3]), ops.convert_to_tensor([[1, 2], [3, 4]])]
        return kd.get_replica_context().all_gather(values, axis=0)

    result = strategy.run(step)
    expected = [[1, 2, 3, 1, 2, 3], [[1, 2], [3, 4], [1, 2], [3, 4]]]
    lab.check(isinstance(result, list), "a list of distributed values")
    lab.equal([expected] * 2, lab.components(result, strategy))


@case
def distribute_lib__ReplicaContext__update__2(lab):
    """The same with a value that was reduced before."""
    strategy = lab.strategy()
    with strategy.scope():
        variable = keras.Variable(5.0, aggregation="sum")

    def merge(strategy, value):
        assign = lambda var, new: var.assign(new / 2.0)  # noqa: E731
        strategy.extended.update(variable, assign, args=(value,))

    def step(x):
        here = kd.get_replica_context()
        here.merge_call(merge, args=(here.all_reduce("SUM", x * 10.0),))

    value = strategy.experimental_distribute_values_from_function(
        lambda context: ops.convert_to_tensor(1.0 + context.replica_id_in_sync_group)
    )
    strategy.run(step, args=(value,))
    lab.equal([15.0, 15.0], lab.components(variable, strategy))
