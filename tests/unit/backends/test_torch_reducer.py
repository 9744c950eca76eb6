"""The order of sums on PyTorch between machines; in a fresh process, as Keras fixes its backend.

When they start within a step: `cases_torch_workers` of the workers.
"""

from tests.fresh import run_forked

IN_ORDER = """
import threading
import torch
from kerasdist.backends.torch.workers.process_group import ReduceScatter

class Work:
    def __init__(self, done):
        self.wait = done.wait

summed = []

def sum_between(own):
    summed.append(own.item())
    own.mul_(10)
    return Work(late)

late, done = threading.Event(), threading.Event()
done.set()
sums = []
for number, event in enumerate([late, done]):
    own = torch.tensor([float(number)])
    sums.append(ReduceScatter(Work(event), own, torch.float64, sum_between))
assert not sums[0].wait(0.01) and summed == [], summed
late.set()
for one in sums + sums:
    assert one.wait()
assert summed == [0, 1], summed
assert [one.part().tolist() for one in sums] == [[0], [10]]
"""


def test_sums_between_machines_start_in_the_order_of_the_buckets():
    """Whichever part is done first: NCCL would wait for ever for workers of another order."""
    run_forked(IN_ORDER, "torch")
