"""The examples of CentralStorageStrategy: variables on one device, computation on many."""

import numpy as np

from tests.facade.case import case
from tests.facade.lazy import kd


def ranges(end, size):
    return [np.arange(i, min(i + size, end), dtype="int32") for i in range(0, end, size)]


@case
def central_storage_strategy__CentralStorageStrategy__1(lab):
    """A dataset of five in batches of two, and a compiled function over it."""
    strategy = kd.CentralStorageStrategy(lab.devices, "cpu:0")
    dataset = strategy.experimental_distribute_dataset(ranges(5, 2))
    train_step = kd.function(lambda value: value + 1)
    results = []
    with strategy.scope():
        for batch in dataset:
            result = strategy.run(train_step, args=(batch,))
            results += [int(x) for part in lab.components(result, strategy) for x in part]
    lab.equal([1, 2, 3, 4, 5], results)


@case
def central_storage_strategy__CentralStorageStrategy_reduce__1(lab):
    """Each batch has a part on every device; a sum over the devices, then over the elements."""
    strategy = kd.CentralStorageStrategy(lab.devices, "cpu:0")
    dataset = strategy.experimental_distribute_dataset([np.arange(8, dtype="int32")])
    for batch in dataset:
        lab.equal([[0, 1, 2, 3], [4, 5, 6, 7]], lab.components(batch, strategy))
        result = strategy.run(kd.function(lambda value: value), args=(batch,))
    lab.equal([4, 6, 8, 10], strategy.reduce(kd.ReduceOp.SUM, result, axis=None))
    lab.equal(28, strategy.reduce(kd.ReduceOp.SUM, result, axis=0))
