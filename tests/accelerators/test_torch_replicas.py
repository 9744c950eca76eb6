"""What replicas on several GPUs do on PyTorch, where stand-ins for GPUs can show it.

In a fresh process, as Keras fixes its backend: `tests.accelerators.torch_replicas`.
"""

import json

import pytest

from kerasdist.launch.placement import free_port
from tests.fresh import run_python
from tests.multiprocess.processes import Processes, report

SECONDS = 300.0

EXPECTED = {
    "rows_are_on_the_replicas_device": [["cpu", "cpu", 3], ["meta", "meta", 2]],
    "cuda_means_the_replicas_gpu": [[3, "cuda:3"], []],
    "steps_compute_on_their_device": ["cpu:0", "cpu:0", "cpu:1"],
    "masks_differ_by_replica": {"in order": [6, True], "in another order": [6, True]},
    "masks_differ_by_worker": True,
    "a_restart_draws_what_the_interrupted_run_would_have_drawn": [True, True],
    # Two replicas elsewhere, two sums.
    "copies_of_gradients": [4, 4],
    "copies_of_variables": [[1, False], [1, False]],
    "copies_of_what_replicas_assign": [1, 1],
    "rows_travel_ahead": [
        "pin 0",
        "copy 0 in side",
        "pin 1",
        "copy 1 in side",
        "compute waits for event after copy 0 in side",
        "0 used in compute",
        "step 0",
        "pin 2",
        "copy 2 in side",
        "compute waits for event after copy 1 in side",
        "1 used in compute",
        "step 1",
        "compute waits for event after copy 2 in side",
        "2 used in compute",
        "step 2",
    ],
    "the_first_broadcast_is_in_parts": [[1], [30], [20, 4, 1]],
    "nccl_leaves_errors_to_the_job": ["0", "3"],
}

# What kerasdist does in a step, and why the host does not wait there.
_KERNELS = "on GPUs torch's own kernels normalize in its place"
ALLOWED = {
    "as_tensor in training/batch_norm.py:_count": _KERNELS,
    "as_tensor in training/batch_norm.py:_of_some": _KERNELS,
    "__int__ in backends/torch/replica/random.py:generator": "torch's CPU generator made it",
    "tensor in backends/torch/workers/process_group.py:_exchange_sizes": "Gloo sends it, from CPUs",
}


@pytest.fixture(scope="module")
def told():
    out = run_python("-m", "tests.accelerators.torch_replicas", KERAS_BACKEND="torch")
    return json.loads(out.splitlines()[-1])


@pytest.mark.parametrize("name", EXPECTED)
def test_as_on_gpus(told, name):
    assert told[name] == EXPECTED[name], told[name]


def test_the_meetings_of_a_step_do_not_grow_with_the_model(told):
    few, many = told["meetings_of_a_step"]
    assert few == many


@pytest.fixture(scope="module")
def waits(told):
    job = {"KERASDIST_WORKERS": "2", "KERASDIST_COORDINATOR": f"localhost:{free_port()}"}
    environments = [{**job, "KERASDIST_RANK": str(rank)} for rank in range(2)]
    with Processes([["-m", "tests.accelerators.torch_waits"]] * 2, environments) as workers:
        ended = workers.join(SECONDS)
    assert [one.code for one in ended] == [0, 0], report(ended)
    [line] = [line for line in ended[0].output.splitlines() if line.startswith('{"')]
    return told["waits"] | json.loads(line)


@pytest.mark.parametrize("step", ["fit", "loop"])
@pytest.mark.parametrize(("kind", "replicas"), [("threads", 2), ("worker", 1)])
def test_the_host_waits_where_plain_keras_does(waits, kind, replicas, step):
    plain, ours = waits["plain"][step], waits[kind][step]
    assert any("optimizer" in place for place in plain)  # the counting works
    more = {place: count for place, count in ours.items() if count > replicas * plain.get(place, 0)}
    assert more.keys() <= ALLOWED.keys()
