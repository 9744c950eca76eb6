"""Data that are distributed, and functions that make data."""

import numpy as np

from tests.facade.case import case
from tests.facade.lazy import kd, ops


def batches(count, size):
    """Consecutive numbers, in batches."""
    return [np.arange(begin, min(begin + size, count)) for begin in range(0, count, size)]


@case
def distribute_lib__ValueContext__1(lab):
    """A value context that is made by hand."""
    context = kd.ValueContext(replica_id_in_sync_group=2, num_replicas_in_sync=4)
    lab.equal(0.5, context.replica_id_in_sync_group / context.num_replicas_in_sync)


@case
def distribute_lib__ValueContext__2(lab):
    """A value function is told the number of replicas."""
    strategy = lab.strategy()
    value = strategy.experimental_distribute_values_from_function(
        lambda context: context.num_replicas_in_sync
    )
    lab.equal([2, 2], list(strategy.experimental_local_results(value)))


@case
def distribute_lib__InputOptions__1(lab):
    """Options that leave the batches on the host change no value."""
    strategy = lab.strategy()
    options = kd.InputOptions(
        experimental_fetch_to_device=False,
        experimental_replication_mode=kd.InputReplicationMode.PER_WORKER,
        experimental_place_dataset_on_device=False,
        experimental_per_replica_buffer_size=1,
    )
    data = strategy.experimental_distribute_dataset(batches(16, 4), options)
    found = [lab.components(batch, strategy) for batch in data]
    lab.equal([[[i, i + 1], [i + 2, i + 3]] for i in range(0, 16, 4)], found)


def epochs_of_sums(lab, strategy, data, compiled):
    """Sums over the data, batch by batch, twice."""

    def epoch(dataset):
        total = 0
        for x in dataset:
            total += step(x)
        return total

    def step(x):
        result = strategy.run(ops.sum, args=(x,))
        return strategy.reduce(kd.ReduceOp.SUM, result, axis=None)

    if compiled:
        step = kd.function(step)
    with strategy.scope():
        distributed = strategy.experimental_distribute_dataset(data)
        lab.equal([28, 28], [epoch(distributed) for _ in range(2)])


@case
def distribute_lib__StrategyBase__1(lab):
    """The loop over a distributed dataset: run, reduce, add up."""
    epochs_of_sums(lab, lab.strategy(), batches(8, 4), compiled=False)


@case
def mirrored_strategy__MirroredStrategy__3(lab):
    """The same with a compiled step."""
    epochs_of_sums(lab, lab.strategy(), batches(8, 4), compiled=True)


@case
def distribute_lib__StrategyBase_experimental_distribute_dataset__1(lab):
    """Each replica gets its part of each global batch."""
    strategy = lab.strategy()
    data = strategy.experimental_distribute_dataset(batches(4, 2))
    double = lambda x: x * 2  # noqa: E731
    found = [lab.components(strategy.run(double, args=(x,)), strategy) for x in data]
    lab.equal([[[0], [2]], [[4], [6]]], found)


@case
def distribute_lib__Strategy_experimental_distribute_values_from_function__1(lab):
    """A tensor a replica."""
    strategy = lab.strategy()
    value = strategy.experimental_distribute_values_from_function(
        lambda _: ops.convert_to_tensor(1.0)
    )
    lab.equal([1.0, 1.0], lab.components(value, strategy))


@case
def distribute_lib__Strategy_experimental_distribute_values_from_function__2(lab):
    """An element of an array a replica."""
    strategy = lab.strategy()
    array = np.array([3.0, 2.0, 1.0])
    value = strategy.experimental_distribute_values_from_function(
        lambda context: array[context.replica_id_in_sync_group]
    )
    lab.equal([3.0, 2.0], [float(one) for one in strategy.experimental_local_results(value)])


@case
def distribute_lib__Strategy_experimental_distribute_values_from_function__3(lab):
    """A plain number a replica stays one."""
    strategy = lab.strategy()
    value = strategy.experimental_distribute_values_from_function(
        lambda context: context.num_replicas_in_sync
    )
    lab.equal((2, 2), strategy.experimental_local_results(value))


@case
def distribute_lib__Strategy_experimental_distribute_values_from_function__4(lab):
    """Tensors that were made before, one on each device."""
    strategy = lab.strategy()
    lab.equal(2, len(strategy.extended.worker_devices))
    tensors = [ops.convert_to_tensor(1.0 + i) for i in range(strategy.num_replicas_in_sync)]
    value = strategy.experimental_distribute_values_from_function(
        lambda context: tensors[context.replica_id_in_sync_group]
    )
    lab.equal([1.0, 2.0], lab.components(value, strategy))


@case
def distribute_lib__StrategyV1_experimental_make_numpy_dataset__1(lab):
    """Arrays as a dataset of rows, which is then distributed in batches."""
    strategy = lab.strategy()
    rows = strategy.experimental_make_numpy_dataset(np.ones([10], dtype="float32"))
    lab.equal([1.0] * 10, list(rows))
    data = strategy.experimental_distribute_dataset(rows.batch(5))
    sizes = [[len(one) for one in lab.components(batch, strategy)] for batch in data]
    lab.equal([[3, 2], [3, 2]], sizes)


@case
def one_device_strategy__OneDeviceStrategy_experimental_distribute_dataset__1(lab):
    """With one device the batches stay whole."""
    strategy = kd.OneDeviceStrategy("cpu:0")
    data = strategy.experimental_distribute_dataset(batches(10, 2))
    lab.equal([[i, i + 1] for i in range(0, 10, 2)], [lab.numpy(x) for x in data])


@case
def one_device_strategy__OneDeviceStrategy_distribute_datasets_from_function__1(lab):
    """A function makes the batches; with one device it is called once, for one pipeline."""
    strategy = kd.OneDeviceStrategy("cpu:0")
    seen = []

    def dataset_fn(context):
        seen.append(context)
        size = context.get_per_replica_batch_size(4)
        return [np.ones([size, 1], "float32")] * 3

    inputs = strategy.distribute_datasets_from_function(dataset_fn)
    found = [strategy.run(ops.sum, args=(batch,)) for batch in inputs]
    lab.equal([4.0, 4.0, 4.0], found)
    lab.equal(
        [(1, 0, 1)],
        [
            (one.num_input_pipelines, one.input_pipeline_id, one.num_replicas_in_sync)
            for one in seen
        ],
    )


@case
def distribute_lib__StrategyV1_make_input_fn_iterator__1(lab):
    """The iterator over what an input function makes: in V2's words, `iter` of the dataset."""
    strategy = lab.strategy()

    def input_fn(context):
        size = context.get_per_replica_batch_size(4)
        data = [np.full([size, 1], 1.0, "float32")] * 4
        return data[context.input_pipeline_id :: context.num_input_pipelines]

    iterator = iter(strategy.distribute_datasets_from_function(input_fn))
    result = strategy.run(ops.sum, args=(next(iterator),))
    lab.equal([2.0, 2.0], lab.components(result, strategy))
