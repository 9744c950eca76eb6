"""The order of workers' collectives, and a group of the script's own, by pairs of real processes.

In `order_script` workers record their collectives (`KERASDIST_DEBUG_COLLECTIVES=1`).
"""

import pytest

from kerasdist.cli.launch.placement import free_port
from tests.conformance.registry import BACKENDS
from tests.multiprocess.forks import Ended, nursery, require
from tests.multiprocess.launching import job_of

SECONDS = 900
RECORDING = {"KERASDIST_DEBUG_COLLECTIVES": "1", "KERASDIST_MEETING_TIMEOUT": "100"}


def run(code: str, backend: str, **own: str) -> list[Ended]:
    environments = job_of(2, **{"KERASDIST_MEETING_TIMEOUT": "40", **own})
    return nursery(backend).begin([code], environments).join(SECONDS)


@pytest.mark.parametrize("backend", BACKENDS)
def test_collectives_have_one_order(backend):
    workers = run("tests.multiprocess.order_script", backend, **RECORDING)
    require(workers, 0, "passed all")


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


def test_a_group_of_the_script_for_gpus_alone(tmp_path):
    (tmp_path / "script.py").write_text(GROUP_OF_THE_SCRIPT, encoding="utf-8")
    workers = run(str(tmp_path / "script.py"), "torch", TEST_PORT=str(free_port()))
    require(workers, 0, "(?s)passed refuses.*passed trains")
