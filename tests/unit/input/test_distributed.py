"""Datasets in pieces: what no case of the facade sees."""

import numpy as np

from kerasdist.api.strategy import Strategy
from kerasdist.input.distributed import distributed
from kerasdist.input.options import InputOptions


def test_a_buffer_reads_ahead_by_its_size_and_no_more():
    read, strategy = [], Strategy(None)

    def batches():
        for index in range(5):
            read.append(index)
            yield np.full(1, index)

    options = InputOptions(experimental_per_replica_buffer_size=2)
    data = distributed(batches(), strategy, options)
    assert distributed(data, strategy, options) is data
    next(iter(data))
    assert read == [0, 1, 2]
