"""Where a step on PyTorch makes the host wait for a GPU: nowhere that plain Keras does not.

In fresh processes, as Keras fixes its backend: `tests.accelerators.torch_waits`.
"""

import json

import pytest

from kerasdist.launch.placement import free_port
from tests.fresh import run_python
from tests.multiprocess.processes import Processes, report

SECONDS = 300.0

# What kerasdist does in a step, and why the host does not wait there.
_KERNELS = "on GPUs torch's own kernels normalize in its place"
ALLOWED = {
    "as_tensor in training/batch_norm.py:_count": _KERNELS,
    "as_tensor in training/batch_norm.py:_of_some": _KERNELS,
    "__int__ in backends/torch/replica/random.py:generator": "torch's CPU generator made it",
    "tensor in backends/torch/workers/process_group.py:_exchange_sizes": "Gloo sends it, from CPUs",
}


@pytest.fixture(scope="module")
def waits():
    """By plain Keras, by replicas that are threads, and by a worker."""
    out = run_python("-m", "tests.accelerators.torch_waits", KERAS_BACKEND="torch")
    job = {"KERASDIST_WORKERS": "2", "KERASDIST_COORDINATOR": f"localhost:{free_port()}"}
    environments = [{**job, "KERASDIST_RANK": str(rank)} for rank in range(2)]
    with Processes([["-m", "tests.accelerators.torch_waits"]] * 2, environments) as workers:
        ended = workers.join(SECONDS)
    assert [one.code for one in ended] == [0, 0], report(ended)
    [line] = [line for line in ended[0].output.splitlines() if line.startswith('{"')]
    return json.loads(out.splitlines()[-1]) | json.loads(line)


@pytest.mark.parametrize("step", ["fit", "loop"])
@pytest.mark.parametrize(("kind", "replicas"), [("threads", 2), ("worker", 1)])
def test_the_host_waits_where_plain_keras_does(waits, kind, replicas, step):
    plain, ours = waits["plain"][step], waits[kind][step]
    assert any("optimizer" in place for place in plain)  # the counting works
    more = {place: count for place, count in ours.items() if count > replicas * plain.get(place, 0)}
    assert more.keys() <= ALLOWED.keys()
