"""Several sources at once: which is believed, and when they contradict each other."""

import pytest

from kerasdist.cluster.detection import detect
from kerasdist.errors import ClusterError, UnsupportedError
from tests.unit.cluster import environments as env

# Worker 1 of 2 by every source; Kubernetes takes the number of pods from ours.
# The first of these that is set decides.
ALL = {
    "KERASDIST": env.OWN,
    "TF_CONFIG": env.TF_CONFIG,
    "torchrun": {**env.PYTORCH_JOB, "RANK": "1", "WORLD_SIZE": "2"},
    "KERAS_DISTRIBUTION": env.KERAS,
    "JAX": {**env.JAX, "JAX_PROCESS_ID": "1", "JAX_NUM_PROCESSES": "2"},
    "Slurm": {**env.SLURM_STEP, "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"},
    "Open MPI": env.OPEN_MPI_5,
    "PMI": env.MPICH,
    "Cloud TPU": {"TPU_WORKER_ID": "1", "TPU_WORKER_HOSTNAMES": "a,b"},
    "SkyPilot": {
        "SKYPILOT_NODE_IPS": "10.0.0.4\n10.0.0.7",
        "SKYPILOT_NODE_RANK": "1",
        "SKYPILOT_NUM_NODES": "2",
    },
    "Kubernetes": env.JOBSET,
}


def test_of_those_that_agree_the_first_is_believed():
    environ: dict[str, str] = {}
    for name in reversed(ALL):
        environ |= ALL[name]
        assert detect(environ).membership().source == name


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        (
            env.TF_CONFIG,
            {**env.TORCHRUN, "RANK": "1", "WORLD_SIZE": "4"},
            [
                "TF_CONFIG says rank=1, num_workers=2",
                "torchrun says rank=1, num_workers=4",
                "Unset",
            ],
        ),
        (env.OWN, env.tf_config("worker", 0, worker=["a:1", "b:1"]), ["KERASDIST", "rank=0"]),
        (env.OPEN_MPI_5, {**env.PYTORCH_JOB, "RANK": "1"}, ["Open MPI", "WORLD_SIZE"]),
        (env.SLURM_STEP, env.CLOUD_TPU, ["Slurm", "Cloud TPU", "TPU_WORKER_ID"]),
    ],
)
def test_a_contradiction_names_both(one, other, said):
    with pytest.raises(ClusterError) as caught:
        detect({**one, **other})
    assert not [words for words in said if words not in str(caught.value)]


@pytest.mark.parametrize(
    ("inner", "source"),
    [(env.TORCHRUN, "torchrun"), (env.OPEN_MPI_5, "Open MPI"), (env.OWN, "KERASDIST")],
)
@pytest.mark.parametrize("outer", [env.SLURM_STEP, env.CLOUD_TPU], ids=["slurm", "tpu"])
def test_a_launcher_in_a_task_is_believed(inner, source, outer):
    """`srun --ntasks-per-node=1 torchrun ...` is how most start torchrun on Slurm."""
    assert detect({**outer, **inner}).membership().source == source


def test_one_worker_that_is_told_to_be_one_is_one():
    alone = {"KERASDIST_WORKERS": "1", "KERASDIST_RANK": "0"}
    assert detect({**env.SLURM_STEP, **alone}) is None


@pytest.mark.parametrize("workers", ["2", "a:1,b:1,c:1"])
def test_another_number_of_workers_beside_torchrun_is_a_contradiction(workers):
    own = {"KERASDIST_WORKERS": workers}
    with pytest.raises(ClusterError, match=f"KERASDIST_WORKERS={workers!r}.* num_workers=8"):
        detect({**env.TORCHRUN, **own})
    assert detect({**env.TORCHRUN, "KERASDIST_WORKERS": "8"}).num_workers == 8


def test_what_is_wrong_in_the_outer_does_not_matter_inside():
    broken = {**env.SLURM_STEP, "SLURM_STEP_NODELIST": "[", "SLURM_PROCID": "x"}
    assert detect({**broken, **env.TORCHRUN}).rank == 5


def test_what_is_wrong_in_any_source_of_the_process_does():
    with pytest.raises(ClusterError, match="TF_CONFIG"):
        detect({**env.TORCHRUN, "TF_CONFIG": "?"})
    with pytest.raises(UnsupportedError):
        detect({**env.OWN, **env.tf_config("ps", 0, ps=["a:1"])})
