"""When sums of gradients start on PyTorch; in a fresh process, as Keras fixes its backend."""

import json

from tests.fresh import run_forked

SCRIPT = """
import json
import keras, torch
from kerasdist.backends.torch.workers.reducer import HookedBuckets
from kerasdist.backends.torch.state.variables import ReplicaScope

class Done:
    def wait(self):
        pass

class Group:
    # A group of two workers that hold the same; it notes what has started.
    device, bytes_per_pack = torch.device("cpu"), None

    def __init__(self):
        self.started = []

    def start_sum(self, flat):
        self.started.append(flat.tolist())
        flat *= 2
        return Done()

def step(served, loss_of):
    variables = [keras.Variable(3.0), keras.Variable(5.0)]
    scope, group = ReplicaScope(0, torch.device("cpu"), copies=False, is_only=True), Group()
    buckets = HookedBuckets(variables, served, group, scope, {})
    assert buckets.begin(scope, 0.5)
    loss_of(*(variable.value for variable in variables)).backward()
    in_backward = list(group.started)
    gradients = [variable.value.grad for variable in variables]
    totals, unserved = buckets.sums(gradients)
    totals = [None if total is None else total.item() for total in totals]
    return {"in backward": in_backward, "sent": group.started, "totals": totals}

both = lambda a, b: 2 * a * b
print(json.dumps({
    "all arrive": step([True, True], both),
    "one without a gradient": step([True, True], lambda a, b: 2 * a),
    "one without a bucket": step([True, False], both),
}))
"""


def test_sums_start_with_the_last_gradient_and_tell_of_those_that_are_missing():
    sent = [[3.0, 5.0, 1.0, 1.0]]  # gradients by their weight, the last first; both are there
    missing = {"in backward": [], "sent": [[0.0, 1.0, 1.0, 0.0]], "totals": [2.0, None]}
    # Until the backward pass has ended, that of a variable without a bucket may come or not.
    without = {"in backward": [], "sent": [[5.0, 1.0, 1.0]], "totals": [10.0, None]}
    assert json.loads(run_forked(SCRIPT, "torch").splitlines()[-1]) == {
        "all arrive": {"in backward": sent, "sent": sent, "totals": [10.0, 6.0]},
        "one without a gradient": missing,
        "one without a bucket": without,
    }


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
