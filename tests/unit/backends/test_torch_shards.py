"""How a worker's part of a variable is cut, and in which order sums start."""

from tests.fresh import run_forked

PROBE = """
from types import SimpleNamespace
import torch
from kerasdist.backends.torch.state.shards import Shard, padded
from kerasdist.backends.torch.workers import process_group
from kerasdist.backends.torch.workers.buckets import ShardedBucket

for size in range(1, 12):
    whole = torch.arange(size, dtype=torch.float32)
    for workers in (1, 2, 3, 4):
        groups = [SimpleNamespace(size=workers, rank=rank) for rank in range(workers)]
        shards = [Shard((size,), group) for group in groups]
        parts = [shard.cut(whole) for shard in shards]
        assert torch.equal(torch.cat(parts), whole), (size, workers)
        messages = [padded(part, shards[0].length) for part in parts]
        assert torch.equal(torch.cat(messages)[:size], whole)
        assert {len(one) for one in messages} == {shards[0].length}
        assert workers * shards[0].length < size + workers
        # Gradients of several weights travel in one message, a row for each worker.
        others = [Shard((3,), group) for group in groups]
        bucket = ShardedBucket([whole, whole[:3]], [shards[0], others[0]], groups[0])
        bucket.put(0, whole, 2.0)
        if size >= 3:
            bucket.put(1, whole[:3], 0.5)
        row = [padded(part, shards[0].length) * 2 for part in parts]
        small = whole[:3] * 0.5 if size >= 3 else torch.zeros(3)
        row = [
            torch.cat([mine, padded(other.cut(small), other.length)])
            for mine, other in zip(row, others, strict=True)
        ]
        assert torch.equal(bucket._numbers, torch.stack(row)), (size, workers)

shard = Shard((3, 5), SimpleNamespace(size=2, rank=1))
matrix = torch.arange(15.0).reshape(3, 5)
assert shard.cut(matrix).tolist() == [8.0 + i for i in range(7)]
shard.cut(matrix).add_(1)  # a view
assert matrix[2, 4] == 15

# Sums between machines start in the order of the buckets, whichever part is done first.
class Work:
    def __init__(self, is_done):
        self.is_completed, self.wait = lambda: is_done, lambda: None

summed = []

def sum_between(own):
    summed.append(own.item())
    own.mul_(10)
    return Work(True)

sums = []
for number, is_done in enumerate([False, True]):
    own, dtype = torch.tensor([float(number)]), torch.float64
    sums.append(process_group.ReduceScatter(Work(is_done), own, own, dtype, sum_between))
    for one in sums:
        one.free()
assert summed == [], summed
for one in sums + sums:
    one.wait()
assert summed == [0, 1], summed
assert [one.part().tolist() for one in sums] == [[0], [10]]
"""


def test_parts_and_sums():
    run_forked(PROBE, "torch")
