"""Data that are distributed, and functions that make data."""

import numpy as np

from tests.facade.case import case
from tests.facade.lazy import kd, ops


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
