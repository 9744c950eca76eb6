"""Replicas simulated with NumPy: a thread each, meeting at a barrier. For tests of arithmetic."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from kerasdist.api.replica_context import LocalBatch, ReplicaContext
from kerasdist.api.strategy import Strategy
from kerasdist.backends.base.collectives import Collectives
from kerasdist.core import context
from kerasdist.input.sharding import bounds_of_replicas

TIME_LIMIT_S = 20


class SimulatedCollectives(Collectives):
    """What one simulated replica sees of the others."""

    def __init__(self, replica, slots, barrier):
        self._replica = replica
        self._slots = slots
        self._barrier = barrier

    def _exchange(self, value):
        self._slots[self._replica] = value
        self._barrier.wait(TIME_LIMIT_S)
        values = list(self._slots)
        self._barrier.wait(TIME_LIMIT_S)
        return values

    def merge_call(self, strategy, function, args, kwargs):
        raise AssertionError("the simulation has no cross-replica code")

    def mean_of_sum(self, total, replicas):
        return total / replicas

    def all_sum(self, tensors, options=None):
        return [sum(parts) for parts in zip(*self._exchange(list(tensors)), strict=True)]

    def all_gather(self, tensor, axis=0):
        return np.concatenate(self._exchange(np.asarray(tensor)), axis)

    def apply_gradients(self, apply, optimizer, gradients, variables):
        raise AssertionError("the simulation has no optimizer")


def run(function, arrays, replicas):
    """Runs `function(context, *pieces)` in every replica on its piece; returns results by rank.

    The one-device contract holds in it, with the share as tensors, as on TensorFlow, so that
    replicas without an example take part too.
    """
    total = len(arrays[0])
    slots = [None] * replicas
    barrier = threading.Barrier(replicas)
    strategy = Strategy(None)

    def replica_main(rank):
        begin, end = bounds_of_replicas(total, replicas)[rank]
        share = LocalBatch(end - begin, total, np.float32((end - begin) / total))
        collectives = SimulatedCollectives(rank, slots, barrier)
        replica = ReplicaContext(strategy, rank, replicas, collectives, share)
        with context.replica_scope(replica):
            return function(replica, *(array[begin:end] for array in arrays))

    with ThreadPoolExecutor(replicas) as pool:
        return list(pool.map(replica_main, range(replicas)))
