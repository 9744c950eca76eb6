"""A worker that alone reads a variable of which each holds a part: the job ends and says so."""

import re

from kerasdist.launch.placement import free_port
from tests.environment import CPU_DEVICES, values
from tests.multiprocess.processes import Processes, report

SECONDS = 300


def test_one_worker_alone_reads():
    common = {
        "KERAS_BACKEND": "jax",
        "KERASDIST_WORKERS": "2",
        "KERASDIST_COORDINATOR": f"localhost:{free_port()}",
        **values(CPU_DEVICES),
    }
    script = ["-m", "tests.multiprocess.divided_script"]
    environments = [{**common, "KERASDIST_RANK": str(rank)} for rank in range(2)]
    with Processes([script] * 2, environments) as processes:
        workers = processes.join(SECONDS)
    said = r"come apart: .*worker 0 is at .read of the divided variable 'sequential/only/kernel'"
    for one in workers:
        assert one.code == 1, report(workers)
        assert re.search(said, one.output), report(workers)
