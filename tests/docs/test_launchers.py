"""Files for launchers stand whole on their pages, and give each worker what kerasdist reads.

What a launcher makes of a file is taken from its code or its documentation, which each case names.
"""

import json
import re

import pytest
import yaml
from kubeflow_trainer_api import models

from kerasdist.cluster import detect
from kerasdist.errors import ClusterError, UnsupportedError
from tests.docs.blocks import blocks_of
from tests.fresh import ROOT

FOLDER = ROOT / "integrations"
PAGES = {
    "kubeflow/trainjob-jax.yaml": "docs/guides/kubeflow.md",
    "kubeflow/trainjob-torch.yaml": "docs/guides/kubeflow.md",
    "skypilot/train.yaml": "docs/guides/skypilot.md",
    "skypilot/train-torch.yaml": "docs/guides/skypilot.md",
    "vertex/job.yaml": "docs/guides/vertex-ai.md",
}


def read(name):
    return yaml.safe_load((FOLDER / name).read_text(encoding="utf-8"))


def places(environments):
    """Where kerasdist finds each process: rank, number of workers, coordinator, local rank."""
    found = [detect(environ).membership() for environ in environments]
    return [(each.rank, each.num_workers, each.coordinator, each.local_rank) for each in found]


def of_torchrun(nodes, processes, master, port, **others):
    """What torchrun sets; https://docs.pytorch.org/docs/stable/elastic/run.html."""
    for node in range(nodes):
        for local in range(processes):
            yield {
                **{name: value(node) for name, value in others.items()},
                "RANK": str(node * processes + local),
                "WORLD_SIZE": str(nodes * processes),
                "LOCAL_RANK": str(local),
                "LOCAL_WORLD_SIZE": str(processes),
                "MASTER_ADDR": master,
                "MASTER_PORT": str(port),
            }


@pytest.mark.parametrize("name", PAGES)
def test_a_file_stands_whole_on_its_page(name):
    text = (FOLDER / name).read_text(encoding="utf-8").rstrip()
    assert text in [block.text for block in blocks_of(PAGES[name]) if block.language == "yaml"]


@pytest.mark.parametrize("name", [name for name in PAGES if name.startswith("kubeflow")])
def test_a_train_job_is_of_the_published_schema(name):
    # A field that the type does not know is left out of what it writes back.
    assert models.TrainerV1alpha1TrainJob.from_dict(read(name)).to_dict() == read(name)


def test_kubeflow_tells_each_pod_its_place_on_jax():
    """As pkg/runtime/framework/plugins/jax/jax.go of kubeflow/trainer 2.2 does."""
    job = read("kubeflow/trainjob-jax.yaml")
    name, trainer = job["metadata"]["name"], job["spec"]["trainer"]
    assert job["spec"]["runtimeRef"] == {"name": "jax-distributed"}
    count = trainer["numNodes"]
    environments = [
        {
            **{each["name"]: each.get("value", "of the Secret") for each in trainer["env"]},
            "JAX_NUM_PROCESSES": str(count),
            "JAX_PROCESS_ID": str(index),
            "JAX_COORDINATOR_ADDRESS": f"{name}-node-0-0.{name}:6666",
            "JAX_COORDINATOR_PORT": "6666",
            "JAX_DISTRIBUTED_BACKEND": "gloo",
            "JOB_COMPLETION_INDEX": str(index),  # of the indexed Job
        }
        for index in range(count)
    ]
    address = "digits-node-0-0.digits:7666"
    assert places(environments) == [(index, count, address, None) for index in range(count)]


def test_kubeflow_starts_torchrun_on_each_pod():
    """As its plugin torch.go does: torchrun's options in PET_ variables, port 29500."""
    job = read("kubeflow/trainjob-torch.yaml")
    trainer = job["spec"]["trainer"]
    assert job["spec"]["runtimeRef"] == {"name": "torch-distributed"}
    assert trainer["command"][0] == "torchrun"
    nodes, processes = trainer["numNodes"], trainer["numProcPerNode"]
    assert trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"] == str(processes)
    environments = of_torchrun(
        nodes, processes, "digits-node-0-0.digits", 29500, JOB_COMPLETION_INDEX=str
    )
    count, address = nodes * processes, "digits-node-0-0.digits:30500"
    assert places(environments) == [
        (rank, count, address, rank % processes) for rank in range(count)
    ]


IPS = ["10.0.0.4", "10.0.0.7", "10.0.0.5", "10.0.0.9"]


def of_skypilot(task):
    """https://docs.skypilot.co/en/latest/running-jobs/environment-variables.html"""
    assert task["num_nodes"] == len(IPS)
    gpus = task["resources"]["accelerators"].partition(":")[2]
    return [
        {
            **task["envs"],
            "SKYPILOT_TASK_ID": "sky-2026-11-25-02-31-22-000000_digits_1",
            "SKYPILOT_NODE_IPS": "\n".join(IPS),
            "SKYPILOT_NODE_RANK": str(rank),
            "SKYPILOT_NUM_NODES": str(task["num_nodes"]),
            "SKYPILOT_NUM_GPUS_PER_NODE": gpus,
        }
        for rank in range(task["num_nodes"])
    ]


def test_skypilot_tells_each_node_its_place():
    found = places(of_skypilot(read("skypilot/train.yaml")))
    [address] = {address for _, _, address, _ in found}
    host, _, port = address.partition(":")
    assert host == IPS[0]
    assert 20000 <= int(port) <= 32767
    assert found == [(rank, 4, address, 0) for rank in range(4)]


def test_under_skypilot_torchrun_describes_the_workers():
    task = read("skypilot/train-torch.yaml")
    nodes = of_skypilot(task)
    options = dict(re.findall(r"--(\w+)=(\$\(.*?\)|\S+)", task["run"]))
    assert options == {
        "nnodes": "$SKYPILOT_NUM_NODES",
        "node_rank": "$SKYPILOT_NODE_RANK",
        "nproc_per_node": "$SKYPILOT_NUM_GPUS_PER_NODE",
        "master_addr": '$(echo "$SKYPILOT_NODE_IPS" | head -n1)',
        "master_port": "29500",
    }
    beside = {name: lambda node, name=name: nodes[node][name] for name in nodes[0]}
    found = places(of_torchrun(4, 8, IPS[0], 29500, **beside))
    assert found == [(rank, 32, f"{IPS[0]}:30500", rank % 8) for rank in range(32)]


def of_vertex(job):
    """https://cloud.google.com/vertex-ai/docs/training/distributed-training#tf-config"""
    pools = job["workerPoolSpecs"]
    cluster = {
        kind: [
            f"cmle-training-workerpool{number}-ab-{index}:2222"
            for index in range(pool["replicaCount"])
        ]
        for number, (kind, pool) in enumerate(zip(("chief", "worker", "ps"), pools, strict=False))
    }
    for kind, addresses in cluster.items():
        for index in range(len(addresses)):
            config = {
                "cluster": cluster,
                "environment": "cloud",
                "job": job,
                "task": {"type": kind, "index": index, "cloud": "ab"},
            }
            yield {"TF_CONFIG": json.dumps(config), "CLUSTER_SPEC": "{}"}


def test_vertex_ai_tells_each_machine_its_place():
    job = read("vertex/job.yaml")
    chief, workers = job["workerPoolSpecs"]
    assert chief["replicaCount"] == 1  # Vertex AI takes no other number there
    assert {**workers, "replicaCount": 1} == chief
    address = "cmle-training-workerpool0-ab-0:3222"
    assert places(of_vertex(job)) == [(rank, 4, address, None) for rank in range(4)]


def test_on_vertex_ai_what_the_page_refuses_is_refused():
    job = read("vertex/job.yaml")
    environ = next(of_vertex(job))
    torchrun = next(of_torchrun(4, 8, "a", 29500))
    with pytest.raises(ClusterError, match="Expected one cluster in the environment"):
        detect({**environ, **torchrun})
    job["workerPoolSpecs"].append(job["workerPoolSpecs"][0])
    with pytest.raises(UnsupportedError, match="no parameter servers"):
        detect(next(of_vertex(job)))
