"""``run_on_ray`` on a Ray cluster of two nodes, both on this machine."""

import re
import time

import numpy as np
import pytest
import ray
from ray.cluster_utils import Cluster

from kerasdist.errors import ClusterError
from kerasdist_ray import RayJobError, attempt, job, run_on_ray
from kerasdist_ray.actor import Node
from kerasdist_ray.process import Answer
from tests.environment import WORKERS, values
from tests.integrations.ray import functions
from tests.multiprocess.launching import left_after

ENV = {"KERAS_BACKEND": "torch", "KERASDIST_MEETING_TIMEOUT": "60", **values(WORKERS)}


@pytest.fixture(scope="module", autouse=True)
def cluster():
    store = 80 * 2**20
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")  # or Ray writes a token into the home folder
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        cluster = Cluster(
            initialize_head=True,
            head_node_args={
                "num_cpus": 1,
                "include_dashboard": False,
                "object_store_memory": store,
            },
        )
        try:
            cluster.add_node(num_cpus=2, object_store_memory=store)
            ray.init(address=cluster.address)
            yield
        finally:
            ray.shutdown()
            cluster.shutdown()


def test_every_worker_runs_fresh_and_knows_its_place():
    told = run_on_ray(functions.tell, 3, env=ENV, args=["hello"], kwargs={"name": "Ray"})
    assert len({each.pop("process") for each in told}) == 3
    places = [["0", "2"], ["1", "2"], ["0", "1"]]
    if told[0]["variables"][1] == "1":  # Ray has taken the nodes in the other order
        places = [["0", "1"], ["0", "2"], ["1", "2"]]
    assert told == [
        {
            "said": "hello Ray",
            "ranks": [0, 1, 2],
            "imported": [],
            "variables": [*place, "0", "torch"],
        }
        for place in places
    ]


def test_ranks_of_a_machine_follow_each_other():
    nodes = [Node(name, f"{name}.example", 20_000 + n) for n, name in enumerate("abab")]
    actors, nodes = attempt._by_machine(["a0", "b0", "a1", "b1"], nodes)
    assert actors == ["a0", "a1", "b0", "b1"]
    assert attempt._meeting_point(nodes) == "a.example:20000"
    assert attempt._meeting_point(nodes[:2]) == "127.0.0.1:20000"
    for own_devices, places in ((False, [(0, 2), (1, 2)] * 2), (True, [(0, 1)] * 4)):
        slots = attempt._slots(nodes, own_devices=own_devices)
        assert [(slot.local_rank, slot.local_workers) for slot in slots] == places
        assert [slot.rank for slot in slots] == [0, 1, 2, 3]
        assert [slot.host for slot in slots] == ["a.example"] * 2 + ["b.example"] * 2


@pytest.mark.parametrize(
    ("workers", "resources", "words"),
    [
        (0, None, "num_workers=0"),
        (2, {"CPU": -1}, "resources={'CPU': -1}"),
        (2, {"GPU": 0}, "resources={'GPU': 0}"),
        (2, {"CPU": 2}, "resources={'CPU': 2} for each; the cluster has {'CPU': 3.0}, and free"),
    ],
)
def test_what_cannot_be_placed(workers, resources, words):
    began = time.monotonic()
    with pytest.raises(ClusterError, match="Received: .*" + re.escape(words)):
        run_on_ray(print, workers, resources, placement_seconds=1)
    assert time.monotonic() - began < 20


def test_fit_equals_one_device():
    results = run_on_ray(functions.fit, 2, env=ENV, args=[7])
    for result in results:
        assert result["replicas"] == 2
        ours, plain = result["histories"]
        assert ours.keys() == plain.keys()
        for name in plain:
            np.testing.assert_allclose(ours[name], plain[name], rtol=1e-5)
        for mine, theirs in zip(*result["weights"], strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)


def test_an_error_comes_out_with_its_rank_and_type():
    with pytest.raises(RayJobError) as caught:
        run_on_ray(functions.raise_an_error, 2, env=ENV)
    error = caught.value
    assert (error.rank, error.exit_code) == (1, 1)
    message = str(error)
    assert message.startswith("[worker 1/2] Expected the function to return on every worker. ")
    assert "Received: LookupError: no such file\nand a second line, after " in message
    assert 'raise LookupError("no such file' in message  # the traceback


def test_a_restart_begins_the_whole_job_again(tmp_path, capfd):
    results = run_on_ray(
        functions.be_killed_the_first_time, 2, env=ENV, max_restarts=2, args=[str(tmp_path)]
    )
    assert results == [[1, 0, 1]] * 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0-0", "0-1", "1-0", "1-1"]
    said = capfd.readouterr().err
    assert "worker 1/2 failed after" in said
    assert "ended by SIGKILL" in said
    assert "starting the job again, 1 of 2" in said
    assert left_after([int(path.read_text()) for path in tmp_path.iterdir()], 5) == []


def test_a_function_that_ends_its_process():
    with pytest.raises(RayJobError, match=re.escape("exit code 0, without a result. Return")):
        job._value(Answer(), rank=0, workers=1)
