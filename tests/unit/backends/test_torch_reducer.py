"""The order of sums on PyTorch between machines; in a fresh process, as Keras fixes its backend.

When they start within a step: `cases_torch_workers` of the workers.
"""

from tests.fresh import run_forked

IN_ORDER = """
import torch
from kerasdist.backends.torch.workers.process_group import ReduceScatter

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
    own = torch.tensor([float(number)])
    sums.append(ReduceScatter(Work(is_done), own, own, torch.float64, sum_between))
    for one in sums:
        one.free()
assert summed == [], summed
for one in sums + sums:
    one.wait()
assert summed == [0, 1], summed
assert [one.part().tolist() for one in sums] == [[0], [10]]
"""


def test_sums_between_machines_start_in_the_order_of_the_buckets():
    """Whichever part is done first: NCCL would wait for ever for workers of another order."""
    run_forked(IN_ORDER, "torch")
