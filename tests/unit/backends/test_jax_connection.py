"""How JAX's workers connect: what is refused before anybody waits."""

from tests.fresh import run_forked

MISLEADING_NAME = """
import types
from kerasdist.backends.jax import connection
from kerasdist.errors import JobError
from kerasdist.job import listening

connection.socket = types.SimpleNamespace(
    gethostname=lambda: "machine", gethostbyname=lambda name: "127.0.1.1"
)
listening.misleads = lambda others: "10.0.0.1"
job = types.SimpleNamespace(rank=0, num_workers=2, other_addresses=["10.0.0.2:1"])
try:
    connection.check_way_back(job)
except JobError as error:
    print(error)
"""


def test_a_machine_that_others_cannot_reach_by_its_name_is_told_what_to_write():
    said = run_forked(MISLEADING_NAME, "jax")
    assert "[worker 0/2] Expected the name of this machine" in said
    assert "'machine', which is 127.0.1.1. Write 10.0.0.1 behind the name, in /etc/hosts" in said
