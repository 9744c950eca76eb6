"""Each source, on the environments that it makes."""

import pytest

from kerasdist import cluster
from kerasdist.cluster.detection import SOURCES, detect, findings
from kerasdist.cluster.source import Absent
from kerasdist.errors import ClusterError, UnsupportedError
from tests.unit.cluster import environments as env

SIX = ("rank", "num_workers", "coordinator", "addresses", "local_rank", "local_workers")
TF_ADDRESSES = ("a.example:2222", "b.example:2222")
VERTEX_ADDRESSES = (
    "cmle-training-master-0:2222",
    "cmle-training-worker-0:2222",
    "cmle-training-worker-1:2222",
)

FOUND = [
    ("own", env.OWN, "KERASDIST", (1, 2, "127.0.0.1:23456", (), 1, 2)),
    ("tf_config", env.TF_CONFIG, "TF_CONFIG", (1, 2, "a.example:3222", TF_ADDRESSES, None, None)),
    (
        "a number as a string",
        env.tf_config("worker", "1", worker=TF_ADDRESSES),
        "TF_CONFIG",
        (1, 2, "a.example:3222", TF_ADDRESSES, None, None),
    ),
    (
        "vertex",
        env.VERTEX,
        "TF_CONFIG",
        (1, 3, "cmle-training-master-0:3222", VERTEX_ADDRESSES, None, None),
    ),
    ("torchrun", env.TORCHRUN, "torchrun", (5, 8, "node-0.example:30500", (), 1, 4)),
    ("pytorch_job", env.PYTORCH_JOB, "torchrun", (2, 3, "mnist-master-0:24456", (), None, None)),
    (
        "keras",
        env.KERAS,
        "KERAS_DISTRIBUTION",
        (1, 2, "10.0.0.1:2234", ("10.0.0.1:1234", "10.0.0.2:2345"), None, None),
    ),
    ("jax", env.JAX, "JAX", (2, 3, "digits-node-0-0.digits:7666", (), None, None)),
    ("skypilot", env.SKYPILOT, "SkyPilot", (1, 3, "10.0.0.4:21185", (), 0, 1)),
    ("slurm", env.SLURM_STEP, "Slurm", (3, 7, "gpu008:25461", (), 1, 2)),
    ("open_mpi_5", env.OPEN_MPI_5, "Open MPI", (1, 2, "127.0.0.1:21682", (), 1, 2)),
    ("open_mpi_4", env.OPEN_MPI_4, "Open MPI", (1, 2, "10.96.0.1:29647", (), 0, 1)),
    ("mpich", env.MPICH, "PMI", (1, 2, "127.0.0.1:27182", (), 1, 2)),
    ("intel_mpi", env.INTEL_MPI, "PMI", (1, 2, "127.0.0.1:28489", (), 1, 2)),
    ("kubernetes", env.KUBERNETES, "Kubernetes", (2, 3, "digits-0.digits-pods:27182", (), 0, 1)),
    ("jobset", env.JOBSET, "Kubernetes", (1, 2, "digits-workers-0-0.digits:27182", (), 0, 1)),
    ("cloud_tpu", env.CLOUD_TPU, "Cloud TPU", (3, 4, "t-0.svc:27182", (), 0, 1)),
    ("tpu_slices", env.CLOUD_TPU_SLICES, "Cloud TPU", (5, 6, "s-0-0.svc:27182", (), 0, 1)),
]


@pytest.mark.parametrize(
    ("environ", "source", "place"), [each[1:] for each in FOUND], ids=[each[0] for each in FOUND]
)
def test_a_source_is_read(environ, source, place):
    resolver = detect(environ)
    membership = resolver.membership()
    assert membership.source == source
    assert tuple(getattr(membership, name) for name in SIX) == place
    assert resolver.num_workers == sum(
        resolver.cluster_spec().num_tasks(job) for job in resolver.cluster_spec().jobs
    )


@pytest.mark.parametrize("environ", [each[1] for each in FOUND], ids=[each[0] for each in FOUND])
def test_the_coordinator_can_be_set_by_hand(environ):
    told = {**environ, "KERASDIST_COORDINATOR": "meet.example:4000"}
    assert detect(told).membership().coordinator == "meet.example:4000"


def test_every_source_has_an_example():
    assert {source.name for source in SOURCES} == {each[2] for each in FOUND}


def test_a_source_lists_what_it_reads():
    """`kerasdist info` shows these; an environment of them alone is read alike."""
    for _, environ, name, place in FOUND:
        [source] = [each for each in SOURCES if each.name == name]
        alone = {key: value for key, value in environ.items() if key in source.variables}
        membership = detect(alone).membership()
        assert tuple(getattr(membership, each) for each in SIX) == place, name


ALONE = [
    ("nothing", {}, None),
    ("one own worker", {"KERASDIST_WORKERS": "1", "KERASDIST_RANK": "0"}, None),
    ("empty TF_CONFIG", {"TF_CONFIG": ""}, "TF_CONFIG is not set"),
    ("TF_CONFIG without a cluster", {"TF_CONFIG": "{}"}, "no cluster"),
    ("TF_CONFIG of one", env.tf_config("worker", 0, worker=["a:1"]), None),
    ("RANK of somebody else", {"RANK": "1", "WORLD_SIZE": "2"}, "MASTER_ADDR"),
    ("sbatch without srun", env.SLURM_SCRIPT, "srun has not started it"),
    ("salloc", env.SLURM_INTERACTIVE, "srun has not started it"),
    ("a step of one", {**env.SLURM_STEP, "SLURM_STEP_NUM_TASKS": "1"}, "one task"),
    ("pods that are strangers", {"JOB_COMPLETION_INDEX": "3"}, "KERASDIST_WORKERS"),
    (
        "a SkyPilot task of one node",
        {
            **env.SKYPILOT,
            "SKYPILOT_NODE_IPS": "10.0.0.4",
            "SKYPILOT_NUM_NODES": "1",
            "SKYPILOT_NODE_RANK": "0",
        },
        "one node",
    ),
    ("JAX's rank alone", {"JAX_PROCESS_ID": "1"}, "JAX_COORDINATOR_ADDRESS"),
    ("a TPU of one host", {"TPU_WORKER_ID": "0", "TPU_WORKER_HOSTNAMES": "localhost"}, "one host"),
]


@pytest.mark.parametrize(
    ("environ", "reason"), [each[1:] for each in ALONE], ids=[each[0] for each in ALONE]
)
def test_a_job_of_one(environ, reason):
    assert detect(environ) is None
    if reason:
        answers = findings(environ).values()
        assert any(reason in each.reason for each in answers if isinstance(each, Absent))


WRONG = [
    ({**env.OWN, "KERASDIST_RANK": "one"}, "KERASDIST_RANK='one'"),
    ({**env.OWN, "KERASDIST_RANK": "2"}, "rank=2"),
    ({**env.OWN, "KERASDIST_RANK": "-1"}, "KERASDIST_RANK='-1'"),
    ({**env.OWN, "KERASDIST_COORDINATOR": ""}, "KERASDIST_COORDINATOR=None"),
    ({**env.OWN, "KERASDIST_COORDINATOR": "host"}, "KERASDIST_COORDINATOR='host'"),
    ({**env.OWN, "KERASDIST_COORDINATOR": "::1:80"}, "KERASDIST_COORDINATOR='::1:80'"),
    ({**env.OWN, "KERASDIST_COORDINATOR": "h:70000"}, "65535"),
    ({**env.OWN, "KERASDIST_WORKERS": "a:1,,b:1"}, "a:1,,b:1"),
    ({**env.OWN, "KERASDIST_LOCAL_RANK": "2"}, "local_rank=2"),
    ({**env.OWN, "KERASDIST_LOCAL_WORKERS": "3"}, "local_workers=3"),
    ({"KERASDIST_RANK": "0"}, "KERASDIST_WORKERS=None"),
    ({"KERASDIST_WORKERS": "2"}, "KERASDIST_RANK=None"),
    ({"TF_CONFIG": "{'cluster': {}}"}, "double quotes"),
    ({"TF_CONFIG": "[]"}, "Received: []"),
    (
        {"TF_CONFIG": '{"cluster": {"worker": "a:1"}, "task": {"type": "worker", "index": 0}}'},
        "a:1",
    ),
    ({"TF_CONFIG": '{"cluster": {"worker": ["a:1"]}}'}, "a type and an index"),
    (env.tf_config("worker", True, worker=["a:1", "b:1"]), "a type and an index"),
    (env.tf_config("worker", 2, worker=["a:1", "b:1"]), "task_id=2"),
    (env.tf_config("worker", 0, worker=["a", "b:1"]), "TF_CONFIG='a'"),
    (env.tf_config("worker", 0, worker=["a:1", "a:1"]), "more than once"),
    (env.tf_config("chief", 0, chief=["a:1", "b:1"]), "one chief"),
    (env.tf_config("master", 0, master=["a:1"], worker=["b:1"]), "'master'"),
    ({**env.TORCHRUN, "MASTER_PORT": ""}, "MASTER_PORT=''"),
    ({**env.TORCHRUN, "WORLD_SIZE": "4"}, "rank=5"),
    ({**env.KERAS, "KERAS_DISTRIBUTION_NUM_PROCESSES": "3"}, "KERAS_DISTRIBUTION_NUM_PROCESSES=3"),
    ({**env.JAX, "JAX_COORDINATOR_ADDRESS": "host"}, "JAX_COORDINATOR_ADDRESS='host'"),
    ({**env.JAX, "JAX_PROCESS_ID": "3"}, "rank=3"),
    ({**env.SKYPILOT, "SKYPILOT_NUM_NODES": "4"}, "SKYPILOT_NUM_NODES=4"),
    ({**env.SLURM_STEP, "SLURM_STEP_NODELIST": "gpu[8-"}, "SLURM_STEP_NODELIST='gpu[8-'"),
    ({**env.OPEN_MPI_4, "OMPI_MCA_orte_hnp_uri": ""}, "mpirun -x KERASDIST_COORDINATOR"),
    ({**env.MPICH, "MPI_LOCALNRANKS": "1", "MPI_LOCALRANKID": "0"}, "mpirun -genv"),
    ({**env.KUBERNETES, "KERASDIST_SERVICE": ""}, "KERASDIST_SERVICE=None"),
    ({**env.KUBERNETES, "HOSTNAME": "node-17"}, "HOSTNAME='node-17'"),
    ({**env.CLOUD_TPU_SLICES, "MEGASCALE_COORDINATOR_ADDRESS": ""}, "MEGASCALE_COORDINATOR"),
]


@pytest.mark.parametrize(("environ", "words"), WRONG, ids=[each[1] for each in WRONG])
def test_what_is_wrong_is_said(environ, words):
    with pytest.raises(ClusterError) as caught:
        detect(environ)
    assert words in str(caught.value)
    assert "Expected" in str(caught.value)
    assert "Received: " in str(caught.value)


@pytest.mark.parametrize(
    ("environ", "instead"),
    [
        (env.tf_config("ps", 0, ps=["p:1"], worker=["a:1"]), "no parameter servers"),
        (env.tf_config("worker", 0, ps=["p:1"], worker=["a:1"]), "no parameter servers"),
        (env.tf_config("evaluator", 0, worker=["a:1"], evaluator=["e:1"]), "validation_data"),
    ],
)
def test_tasks_that_there_are_not(environ, instead):
    with pytest.raises(UnsupportedError, match=instead):
        detect(environ)


def test_an_evaluator_does_not_count():
    environ = env.tf_config("worker", 1, chief=["c:1"], worker=["a:1", "b:1"], evaluator=["e:1"])
    assert detect(environ).membership().addresses == ("c:1", "a:1", "b:1")
    assert detect(environ).rank == 2


@pytest.mark.parametrize(
    ("workers", "coordinator", "addresses"),
    [
        ("h1, h2,h3", "h1:27182", ()),
        ("h1:5000,h2:5000", "h1:6000", ("h1:5000", "h2:5000")),
        ("[fe80::1]:5000,[fe80::2]:5000", "[fe80::1]:6000", ("[fe80::1]:5000", "[fe80::2]:5000")),
        ("[fe80::1],[fe80::2]", "[fe80::1]:27182", ()),
    ],
)
def test_own_variables_name_hosts_or_addresses(workers, coordinator, addresses):
    place = detect({"KERASDIST_WORKERS": workers, "KERASDIST_RANK": "1"}).membership()
    assert place.num_workers == len(workers.split(","))
    assert (place.coordinator, place.addresses) == (coordinator, addresses)


@pytest.mark.parametrize(
    ("told", "host"),
    [
        ({"OMPI_MCA_orte_hnp_uri": "13.0;tcp6://[2620:10d::2,fe80::1]:43370"}, "[2620:10d::2]"),
        ({"OMPI_MCA_orte_hnp_uri": "13.0;tcp://10.96.0.1:34911"}, "10.96.0.1"),
        ({"PMIX_NAMESPACE": "prterun-gpu-node-7-9204@1"}, "gpu-node-7"),
    ],
)
def test_where_mpirun_is(told, host):
    two = {**env.OPEN_MPI_5, "OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
    assert detect({**two, **told}).membership().coordinator.rpartition(":")[0] == host


def test_steps_and_jobs_of_slurm_that_follow_each_other_have_ports_of_their_own():
    ports = {
        detect({**env.SLURM_STEP, "SLURM_JOB_ID": f"{job}", "SLURM_STEP_ID": f"{step}"})
        .membership()
        .coordinator.rpartition(":")[2]
        for job in (1000, 1001, 1002)
        for step in (0, 1, 2)
    }
    assert len(ports) == 9
    assert all(20_000 <= int(each) < 32_768 for each in ports)


def test_pmi_beside_slurm_agrees():
    """`srun --mpi=pmi2` sets PMI's variables too; Slurm knows the host."""
    environ = {**env.SLURM_STEP, "PMI_RANK": "3", "PMI_SIZE": "7", "PMI_JOBID": "184213.0"}
    with pytest.raises(ClusterError, match="mpirun"):  # which PMI alone would be refused for
        cluster.PMIClusterResolver(environ)
    assert detect(environ).membership().coordinator == "gpu008:25461"


@pytest.mark.parametrize("resolver", SOURCES.values(), ids=lambda each: each.__name__)
def test_a_resolver_that_is_asked_for_must_find_its_cluster(resolver):
    with pytest.raises(ClusterError, match="Received: "):
        resolver({})
