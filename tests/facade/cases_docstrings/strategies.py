"""`run`, `reduce` and `gather`."""

from tests.facade.case import case
from tests.facade.lazy import kd, ops


def replica_ids(strategy):
    def step():
        return ops.convert_to_tensor(kd.get_replica_context().replica_id_in_sync_group)

    return strategy.run(step)


@case
def distribute_lib__StrategyBase_run__2(lab):
    """`run` in a compiled function, of values that are made there."""
    strategy = lab.strategy()

    @kd.function
    def compiled():
        values = strategy.experimental_distribute_values_from_function(
            lambda context: context.num_replicas_in_sync
        )
        return strategy.run(lambda x: x * 2, args=(values,))

    # Equal in all replicas: it may come out as one tensor.
    lab.equal({4}, {int(one) for one in lab.components(compiled(), strategy)})


@case
def distribute_lib__StrategyBase_run__3(lab):
    """An all-reduce in `run` in a compiled function."""
    strategy = lab.strategy()

    @kd.function
    def compiled():
        values = strategy.experimental_distribute_values_from_function(
            lambda context: ops.convert_to_tensor(context.replica_id_in_sync_group, "int32")
        )
        step = lambda x: kd.get_replica_context().all_reduce("sum", x)  # noqa: E731
        return strategy.run(step, args=(values,))

    lab.equal([1, 1], lab.components(compiled(), strategy))


@case
def distribute_lib__StrategyBase_reduce__2(lab):
    """Components are on their replicas' devices, what they are reduced to is one tensor."""
    strategy = lab.strategy()
    result = replica_ids(strategy)
    devices = [lab.device(one) for one in strategy.experimental_local_results(result)]
    # PyTorch has one CPU device, whatever the number of replicas.
    lab.equal(["cpu:0", "cpu:0" if lab.backend == "torch" else "cpu:1"], devices)
    total = strategy.reduce("SUM", result, axis=None)
    lab.equal(1, len(strategy.experimental_local_results(total)))
    lab.equal("cpu:0", lab.device(total))


@case(replicas=(4,))
def distribute_lib__Strategy_gather__2(lab):
    """Components of three dimensions, along each of them."""
    strategy = lab.strategy()
    tensor = ops.reshape(ops.arange(6), (1, 2, 3))
    value = strategy.experimental_distribute_values_from_function(lambda _: ops.copy(tensor))
    gather = kd.function(lambda axis: strategy.gather(value, axis=axis))
    one = [[0, 1, 2], [3, 4, 5]]
    lab.equal([one] * 4, gather(0))
    lab.equal([one * 4], gather(1))
    lab.equal([[row * 4 for row in one]], gather(2))
