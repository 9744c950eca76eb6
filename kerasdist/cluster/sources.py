"""The table of launchers and schedulers whose environment variables describe a cluster.

For each launcher or scheduler, a function reads the variables, and a `Source` lists their names.
Two sources have their own files: kerasdist's own variables, and Cloud TPU, which also asks the
metadata server.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping
from typing import Any, cast

from kerasdist.cluster import addresses, kerasdist_variables
from kerasdist.cluster.source import Absent, Membership, Source, Variables
from kerasdist.cluster.spec import ClusterSpec, place_of
from kerasdist.errors import ClusterError

_TF_CONFIG = "TF_CONFIG"
_EXAMPLE = (
    '{"cluster": {"worker": ["host1:2222", "host2:2222"]}, "task": {"type": "worker", "index": 0}}'
)


def _read_tf_config(variables: Variables) -> Membership | Absent:
    """Reads ``TF_CONFIG``.

    TensorFlow listens at the addresses of ``TF_CONFIG``, so the coordinator has another port.
    """
    config = _require_mapping(_parse(variables.text(_TF_CONFIG)), _TF_CONFIG)
    cluster = _require_mapping(config.get("cluster") or {}, "cluster")
    if not cluster:
        return Absent(f"{_TF_CONFIG} has no cluster.")
    task_type, task_id = _read_task(_require_mapping(config.get("task") or {}, "task"))
    try:
        spec = ClusterSpec(cluster)
    except TypeError as error:
        raise _wrong_config("lists of addresses in its cluster", cluster) from error
    return variables.task(spec, task_type, task_id)


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ClusterError(
            f"Expected {_TF_CONFIG} to be JSON, such as '{_EXAMPLE}'. "
            f"Received: {_TF_CONFIG}={text!r}, where {error.msg} at character {error.pos}. "
            "JSON has double quotes, and no comma before a closing bracket."
        ) from error


def _read_task(task: Mapping[str, Any]) -> tuple[str, int]:
    task_type, index = task.get("type"), task.get("index")
    # Some orchestrators write the number as a string, which TensorFlow accepts.
    if isinstance(index, str) and index.isdecimal():
        index = int(index)
    if not isinstance(task_type, str) or not isinstance(index, int) or isinstance(index, bool):
        raise _wrong_config("a task with a type and an index, which is this process's own", task)
    return task_type, index


def _require_mapping(value: object, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _wrong_config(f"an object as {name}", value)
    return cast("dict[str, Any]", value)


def _wrong_config(expected: str, value: object) -> ClusterError:
    return ClusterError(
        f"Expected {_TF_CONFIG} to have {expected}, as in '{_EXAMPLE}'. Received: {value!r}."
    )


def _read_torchrun(variables: Variables) -> Membership | Absent:
    """Reads the variables that torchrun sets.

    Another program listens on ``MASTER_PORT``, so kerasdist's coordinator has another port.
    """
    # RANK and WORLD_SIZE are common names, but with MASTER_ADDR they are torch's.
    if not variables.has("MASTER_ADDR"):
        return Absent("RANK and WORLD_SIZE are set, but not MASTER_ADDR.")
    rank, count = variables.integer("RANK"), variables.integer("WORLD_SIZE")
    master = addresses.join(variables.text("MASTER_ADDR"), variables.integer("MASTER_PORT"))
    coordinator = addresses.coordinator_of([master], "MASTER_ADDR:MASTER_PORT")
    local = variables.local(["LOCAL_RANK"], ["LOCAL_WORLD_SIZE"])
    return variables.worker(rank, count, coordinator, local=local)


_KERAS_ADDRESSES = "KERAS_DISTRIBUTION_JOB_ADDRESSES"
_KERAS_COUNT = "KERAS_DISTRIBUTION_NUM_PROCESSES"
_KERAS_RANK = "KERAS_DISTRIBUTION_PROCESS_ID"


def _read_keras(variables: Variables) -> Membership | Absent:
    """Reads Keras's own variables, which `keras.distribution.initialize` reads.

    ``KERAS_DISTRIBUTION_JOB_ADDRESSES`` has the addresses of all processes, or only of the first,
    which is enough for JAX. A framework listens at these addresses, so the coordinator's port is
    another one.
    """
    rank = variables.integer(_KERAS_RANK)
    # On Cloud TPU Keras needs no addresses. Then the source Cloud TPU is used in place of this one.
    if not variables.has(_KERAS_ADDRESSES):
        return Absent(f"{_KERAS_RANK} is set, but not {_KERAS_ADDRESSES}.")
    entries = [entry.strip() for entry in variables.text(_KERAS_ADDRESSES).split(",")]
    count = variables.optional_integer(_KERAS_COUNT)
    count = len(entries) if count is None else count
    if len(entries) not in (1, count):
        raise ClusterError(
            f"Expected the address of each of {count} processes, or of the first alone. Received: "
            f"{_KERAS_ADDRESSES}={','.join(entries)!r}, {_KERAS_COUNT}={count}."
        )
    _, listed = place_of(ClusterSpec({"worker": entries}), "worker", 0, _KERAS_ADDRESSES)
    coordinator = addresses.coordinator_of(listed, _KERAS_ADDRESSES)
    known = listed if len(entries) == count else ()
    return variables.worker(rank, count, coordinator, addresses=known)


_JAX_ADDRESS = "JAX_COORDINATOR_ADDRESS"
_JAX_COUNT, _JAX_RANK = "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"


def _read_jax(variables: Variables) -> Membership | Absent:
    """Reads JAX's variables.

    JAX itself listens at ``JAX_COORDINATOR_ADDRESS``, so kerasdist's coordinator has another port.
    """
    coordinator = addresses.coordinator_of([variables.text(_JAX_ADDRESS)], _JAX_ADDRESS)
    rank, count = variables.integer(_JAX_RANK), variables.integer(_JAX_COUNT)
    return variables.worker(rank, count, coordinator)


# Slurm gives the largest 32-bit numbers to steps that no `srun` has started.
# These steps are the script of sbatch and the shell of salloc.
_FIRST_SPECIAL_STEP = 0xFFFF_FFF0


def _read_slurm(variables: Variables) -> Membership | Absent:
    """Reads the variables of a step that ``srun`` has started.

    Rank 0 is on the first node of the step, unless the distribution of tasks is ``arbitrary``. The
    nodes of the other ranks depend on the distribution, so no addresses are returned.
    """
    if not variables.has("SLURM_STEP_ID", "SLURM_PROCID"):
        return Absent("This process is in a Slurm job, but in no step: srun has not started it.")
    step = variables.integer("SLURM_STEP_ID")
    if step >= _FIRST_SPECIAL_STEP:
        return Absent("This process is in the shell of a Slurm job: srun has not started it.")
    rank = variables.integer("SLURM_PROCID")
    # In a step SLURM_STEP_NUM_TASKS and SLURM_NTASKS both have the step's number of tasks. Scripts
    # may overwrite SLURM_NTASKS, so the other one is read first.
    count = variables.optional_integer("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    count = variables.integer("SLURM_NTASKS") if count is None else count
    if count == 1:
        return Absent("This Slurm step has one task.")
    name = "SLURM_STEP_NODELIST" if variables.has("SLURM_STEP_NODELIST") else "SLURM_JOB_NODELIST"
    port = addresses.of_job(variables.integer("SLURM_JOB_ID"), step)
    coordinator = addresses.join(addresses.expand(variables.text(name), name)[0], port)
    local = variables.optional_integer("SLURM_LOCALID"), _count_tasks_of_node(variables)
    return variables.worker(rank, count, coordinator, local=local)


def _count_tasks_of_node(variables: Variables) -> int | None:
    names = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    text, node = variables.optional_text(*names), variables.optional_integer("SLURM_NODEID")
    if text is None or node is None:
        return None
    by_node = addresses.counts(text, names[0])
    return by_node[node] if node < len(by_node) else None


def _port_of(job: str | None) -> int:
    """Returns a port that is the same on all ranks of a job, and differs between most jobs."""
    return addresses.DEFAULT_PORT if job is None else addresses.of_job(zlib.crc32(job.encode()))


_NAMESPACE = "PMIX_NAMESPACE"  # Open MPI 5: prterun-<host of mpirun>-<its process>@<job>
_URI = "OMPI_MCA_orte_hnp_uri"  # Open MPI 4: <job>.0;tcp://<addresses of mpirun>:<port>


def _read_open_mpi(variables: Variables) -> Membership | Absent:
    """Reads the variables that Open MPI's ``mpirun`` sets, also for programs without MPI.

    Rank 0 is assumed to be on the machine of ``mpirun``. This assumption is right unless a list of
    hosts leaves out that machine.
    """
    rank = variables.integer("OMPI_COMM_WORLD_RANK")
    count = variables.integer("OMPI_COMM_WORLD_SIZE")
    local = variables.local(["OMPI_COMM_WORLD_LOCAL_RANK"], ["OMPI_COMM_WORLD_LOCAL_SIZE"])
    job = variables.optional_text(_URI, _NAMESPACE)
    host = "127.0.0.1" if local[1] == count else _machine_of_mpirun(job or "")
    coordinator = None if host is None else addresses.join(host, _port_of(job))
    return variables.worker(rank, count, coordinator, local=local)


def _machine_of_mpirun(job: str) -> str | None:
    uri = re.search(r"tcp6?://(?:\[([^\],]+)|([^,:\[]+))", job)
    if uri is not None:
        return uri[1] or uri[2]
    namespace = re.fullmatch(r"prte(?:run)?-(.+)-\d+@\d+", job)
    return None if namespace is None else namespace[1]


_PMI_LOCAL_RANK = ("MPI_LOCALRANKID", "PALS_LOCAL_RANKID", "PMI_LOCAL_RANK")
_PMI_LOCAL_WORKERS = ("MPI_LOCALNRANKS", "PALS_LOCAL_SIZE", "PMI_LOCAL_SIZE")
_PMI_JOB = ("I_MPI_HYDRA_UUID", "PALS_APID", "PMI_JOBID")


def _read_pmi(variables: Variables) -> Membership | Absent:
    """Reads the variables that ``mpirun`` of MPICH, Intel MPI, MVAPICH or Cray sets (PMI).

    The variables do not name the machine of rank 0. In a job of several machines, the user must
    name it by ``KERASDIST_COORDINATOR``.
    """
    rank, count = variables.integer("PMI_RANK"), variables.integer("PMI_SIZE")
    local = variables.local(_PMI_LOCAL_RANK, _PMI_LOCAL_WORKERS)
    port = _port_of(variables.optional_text(*_PMI_JOB))
    coordinator = addresses.join("127.0.0.1", port) if local[1] == count else None
    return variables.worker(rank, count, coordinator, local=local)


_SKY_ADDRESSES, _SKY_RANK = "SKYPILOT_NODE_IPS", "SKYPILOT_NODE_RANK"
_SKY_COUNT, _SKY_TASK = "SKYPILOT_NUM_NODES", "SKYPILOT_TASK_ID"


def _read_skypilot(variables: Variables) -> Membership | Absent:
    """Reads the variables of a SkyPilot task, whose command runs once on each node."""
    nodes = variables.text(_SKY_ADDRESSES).split()
    count = variables.optional_integer(_SKY_COUNT)
    if count not in (None, len(nodes)):
        raise ClusterError(
            f"Expected the address of each of {count} nodes. Received: {_SKY_ADDRESSES}={nodes}, "
            f"{_SKY_COUNT}={count}."
        )
    if len(nodes) == 1:
        return Absent("This SkyPilot task has one node.")
    port = _port_of(variables.optional_text(_SKY_TASK))
    rank = variables.integer(_SKY_RANK)
    return variables.worker(rank, len(nodes), addresses.join(nodes[0], port), local=(0, 1))


_INDEX, _SERVICE = "JOB_COMPLETION_INDEX", "KERASDIST_SERVICE"


def _read_kubernetes(variables: Variables) -> Membership | Absent:
    """Reads the index of a pod in an indexed Job or JobSet, and further variables of its manifest.

    Kubernetes gives a pod its index, but not the number of pods. ``KERASDIST_WORKERS`` must give
    this number. Without that variable the pods of a Job are independent.
    """
    own = kerasdist_variables
    if not variables.has(own.WORKERS):
        return Absent(f"{_INDEX} is set, but {own.WORKERS}, the number of pods, is not.")
    rank = variables.integer(_INDEX)
    count, addresses, coordinator = own.workers(variables.text(own.WORKERS))
    if coordinator is None and count > 1 and not variables.has(own.COORDINATOR):
        coordinator = _address_of_first_pod(variables, rank)
    return variables.worker(rank, count, coordinator, addresses=addresses, local=(0, 1))


def _address_of_first_pod(variables: Variables, rank: int) -> str:
    """Returns the address of pod 0. Pods are named by their index: ``<job>-<index>.<service>``."""
    host = variables.text("HOSTNAME")
    job, _, index = host.rpartition("-")
    if not variables.has(_SERVICE) or not job or index != str(rank):
        raise ClusterError(
            f"Expected {_SERVICE}, the headless service that is the Job's subdomain, and a "
            f"HOSTNAME that ends with the pod's index. Received: {_SERVICE}="
            f"{variables.optional_text(_SERVICE)!r}, HOSTNAME={host!r}, {_INDEX}={rank}. Set it in "
            f"the manifest, or {kerasdist_variables.COORDINATOR} to host:port of pod 0."
        )
    return addresses.join(f"{job}-0.{variables.text(_SERVICE)}", addresses.DEFAULT_PORT)


# The second argument of a `Source` has the variables that must be set. If one of them is not set,
# the source describes no cluster.
TF_CONFIG = Source(_TF_CONFIG, (_TF_CONFIG,), (), _read_tf_config)
TORCHRUN = Source(
    "torchrun",
    ("RANK", "WORLD_SIZE"),
    ("MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    _read_torchrun,
)
KERAS = Source("KERAS_DISTRIBUTION", (_KERAS_RANK,), (_KERAS_ADDRESSES, _KERAS_COUNT), _read_keras)
JAX = Source("JAX", (_JAX_ADDRESS, _JAX_COUNT, _JAX_RANK), (), _read_jax)
SLURM = Source(
    "Slurm",
    ("SLURM_JOB_ID",),
    (
        *("SLURM_STEP_ID", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_NUM_TASKS"),
        *("SLURM_JOB_NODELIST", "SLURM_STEP_NODELIST", "SLURM_LOCALID", "SLURM_NODEID"),
        *("SLURM_TASKS_PER_NODE", "SLURM_STEP_TASKS_PER_NODE"),
    ),
    _read_slurm,
    is_of_place=True,
)
OPEN_MPI = Source(
    "Open MPI",
    ("OMPI_COMM_WORLD_RANK",),
    (
        *("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
        *(_NAMESPACE, _URI),
    ),
    _read_open_mpi,
    f"Start with mpirun -x {addresses.COORDINATOR_VARIABLE}=host:{addresses.DEFAULT_PORT}",
)
PMI = Source(
    "PMI",
    ("PMI_RANK", "PMI_SIZE"),
    (*_PMI_LOCAL_RANK, *_PMI_LOCAL_WORKERS, *_PMI_JOB),
    _read_pmi,
    f"Start with mpirun -genv {addresses.COORDINATOR_VARIABLE} host:{addresses.DEFAULT_PORT}",
)
SKYPILOT = Source(
    "SkyPilot",
    (_SKY_RANK, _SKY_ADDRESSES),
    (_SKY_COUNT, _SKY_TASK),
    _read_skypilot,
    is_of_place=True,
)
KUBERNETES = Source(
    "Kubernetes",
    (_INDEX,),
    (kerasdist_variables.WORKERS, _SERVICE, "HOSTNAME"),
    _read_kubernetes,
    is_of_place=True,
)
