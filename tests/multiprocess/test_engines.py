"""What is a backend's own in its engine of many workers: one pair of real processes each."""

import re
from pathlib import Path

import pytest

from kerasdist.launch.placement import free_port
from tests.environment import CPU_DEVICES, values
from tests.multiprocess.processes import Processes, report

SECONDS = 900
WORKERS = 2
COMMON = {
    "KERASDIST_WORKERS": str(WORKERS),
    "KERASDIST_MEETING_TIMEOUT": "40",
    "PYTHONWARNINGS": "ignore",
}
# Two devices a worker on JAX, where a worker may have several.
OWN = {
    "jax": {"KERASDIST_CPU_DEVICES": "2", **values(CPU_DEVICES)},
    "torch": values(CPU_DEVICES),
}


def cases(backend: str) -> list[str]:
    script = Path(__file__).with_name(f"{backend}_script.py")
    return re.findall(r"@case\ndef (\w+)", script.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def ended():
    """How the workers of a backend ended; each pair runs once."""
    known = {}

    def of(backend):
        if backend not in known:
            known[backend] = run(backend)
        return known[backend]

    return of


def run(backend: str):
    common = {**COMMON, **OWN[backend], "KERASDIST_COORDINATOR": f"localhost:{free_port()}"}
    environments = [{**common, "KERASDIST_RANK": str(rank)} for rank in range(WORKERS)]
    script = ["-m", f"tests.multiprocess.{backend}_script"]
    with Processes([script] * WORKERS, environments) as processes:
        return processes.join(SECONDS)


@pytest.mark.parametrize(("backend", "name"), [(one, name) for one in OWN for name in cases(one)])
def test_case(ended, backend, name):
    workers = ended(backend)
    for one in workers:
        assert f"passed {name}\n" in one.output, report(workers)


@pytest.mark.parametrize("backend", OWN)
def test_ends_well(ended, backend):
    workers = ended(backend)
    assert [one.code for one in workers] == [0] * WORKERS, report(workers)


# A group of the script as "nccl" makes it, which serves no tensors on CPUs; here it is Gloo's.
GROUP_OF_THE_SCRIPT = """
import os
import torch, torch.distributed as dist

rank, workers = (int(os.environ[f"KERASDIST_{one}"]) for one in ("RANK", "WORKERS"))
made = lambda store, rank, size, timeout: dist.ProcessGroupGloo(store, rank, size, timeout)
dist.Backend.register_backend("gpus_alone", made, devices=["cuda"])
store = dist.TCPStore("localhost", int(os.environ["TEST_PORT"]), workers, is_master=rank == 0)
dist.init_process_group("gpus_alone", store=store, rank=rank, world_size=workers)
try:
    dist.all_reduce(torch.ones(1))
except RuntimeError:
    print("passed refuses", flush=True)

import kerasdist as kd
strategy = kd.MultiWorkerMirroredStrategy()
import keras, numpy as np
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
x = np.random.default_rng(0).normal(size=(10, 4)).astype("float32")
model.fit(x, x[:, :1], batch_size=4, verbose=0)  # the last batch has a row for each worker
total = strategy.reduce("SUM", strategy.run(lambda: torch.ones(()) * (rank + 1)), axis=None)
assert total == sum(range(workers + 1)), total
print("passed trains", flush=True)
"""


def test_defect_11_a_group_of_the_script_for_gpus_alone():
    ports = {"KERASDIST_COORDINATOR": f"localhost:{free_port()}", "TEST_PORT": str(free_port())}
    common = {**COMMON, **OWN["torch"], **ports, "KERAS_BACKEND": "torch"}
    environments = [{**common, "KERASDIST_RANK": str(rank)} for rank in range(WORKERS)]
    with Processes([["-c", GROUP_OF_THE_SCRIPT]] * WORKERS, environments) as processes:
        workers = processes.join(120)
    for one in workers:
        assert "passed refuses" in one.output, report(workers)
        assert "passed trains" in one.output, report(workers)
        assert one.code == 0, report(workers)
