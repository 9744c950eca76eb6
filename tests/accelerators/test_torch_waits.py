"""Where a step on PyTorch makes the host wait for a GPU: nowhere that plain Keras does not.

In separate processes, because Keras fixes its backend: `tests.accelerators.torch_waits`.
"""

import json

import pytest

from kerasdist.cli.launch.placement import free_port
from tests.fresh import run_forked, run_forks

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
    job = {"KERASDIST_WORKERS": "2", "KERASDIST_COORDINATOR": f"localhost:{free_port()}"}
    code = "from tests.accelerators.torch_waits import main; main()"
    outputs = [
        run_forked(code, "torch"),
        *run_forks(code, "torch", [{**job, "KERASDIST_RANK": str(rank)} for rank in range(2)]),
    ]
    alone, worker, _ = (json.loads(output.splitlines()[-1]) for output in outputs)
    return alone | worker


@pytest.mark.parametrize("step", ["fit", "loop"])
@pytest.mark.parametrize(("kind", "replicas"), [("threads", 2), ("worker", 1)])
def test_the_host_waits_where_plain_keras_does(waits, kind, replicas, step):
    plain, ours = waits["plain"][step], waits[kind][step]
    assert any("optimizer" in place for place in plain)  # the counting works
    more = {place: count for place, count in ours.items() if count > replicas * plain.get(place, 0)}
    assert more.keys() <= ALLOWED.keys()
