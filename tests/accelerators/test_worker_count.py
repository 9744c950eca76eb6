"""How many workers a job has, where it does not say."""

import pytest

from kerasdist.cli.launch.placement import counted, place
from kerasdist.cli.launch.spec import JobSpec
from kerasdist.errors import ClusterError, DeviceError


@pytest.fixture(autouse=True)
def eight_gpus(machine_with):
    machine_with("8")


def job(workers=None, backend="torch", visible="0,1,2", **others):
    environment = {"KERAS_BACKEND": backend, "CUDA_VISIBLE_DEVICES": visible}
    return counted(JobSpec(["x"], workers, environment=environment, **others))


@pytest.mark.parametrize(
    ("workers", "backend", "visible", "expected"),
    [
        (None, "torch", "0,1,2", 3),
        (None, "jax", "0,1,2", 1),
        (None, "tensorflow", "0,1,2", 1),
        (None, "torch", "-1", 1),
        ("gpu", "torch", "0,1,2", 3),
        ("gpu", "jax", "GPU-00000000,GPU-00000007", 2),
        ("gpu", "torch", "5", 1),
        ("gpu", "torch", "1,-1,0", 1),
        (2, "torch", "0,1,2", 2),
    ],
)
def test_a_worker_a_gpu_where_that_is_faster_or_asked_for(workers, backend, visible, expected):
    assert job(workers, backend, visible).workers == expected
    assert counted(JobSpec(["x"], "gpu", environment={"KERAS_BACKEND": "jax"})).workers == 8


def test_a_mirrored_strategy_may_be_over_workers_that_were_counted_alone():
    assert job("gpu").environment["KERASDIST_MIRRORED"] == "own"
    for one in (job(2), job("gpu", visible="5"), job(hosts=("a:2",))):
        assert "KERASDIST_MIRRORED" not in one.environment


def test_no_gpu_to_count():
    with pytest.raises(DeviceError, match="CUDA_VISIBLE_DEVICES='-1'"):
        job("gpu", visible="-1")


def test_hosts_tell_their_gpus_as_slots():
    assert job("gpu", hosts=("a:2,b:3",)).workers == "gpu"
    assert len(place("gpu", ("a:2,b:3",))) == 5
    with pytest.raises(ClusterError, match="a:8 for a host of eight GPUs"):
        place("gpu", ("a,b:3",))
