"""Environments of workers, as schedulers and launchers set them.

Those of Open MPI 5.0.11, MPICH 5 and Intel MPI 2021 were printed by two processes on one machine;
the others follow the documentation of their makers. What does not bear on the cluster is left out.
"""

import json


def of(text, **more):
    """Returns an environment from words such as `env` prints."""
    return dict(word.split("=", 1) for word in text.split()) | more


def tf_config(task_type, index, **cluster):
    config = {"cluster": cluster, "task": {"type": task_type, "index": index}}
    return {"TF_CONFIG": json.dumps(config)}


OWN = of("""KERASDIST_WORKERS=2 KERASDIST_RANK=1 KERASDIST_COORDINATOR=127.0.0.1:23456
    KERASDIST_LOCAL_RANK=1 KERASDIST_LOCAL_WORKERS=2""")

TF_CONFIG = tf_config("worker", 1, worker=["a.example:2222", "b.example:2222"])

VERTEX = {  # what Vertex AI adds is no harm
    "TF_CONFIG": json.dumps(
        {
            "cluster": {
                "chief": ["cmle-training-master-0:2222"],
                "worker": ["cmle-training-worker-0:2222", "cmle-training-worker-1:2222"],
            },
            "environment": "cloud",
            "job": {"python_module": "trainer.task"},
            "task": {"type": "worker", "index": 0, "trial": "1"},
        }
    )
}

TORCHRUN = of("""RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4 GROUP_RANK=1 GROUP_WORLD_SIZE=2
    ROLE_RANK=5 ROLE_WORLD_SIZE=8 ROLE_NAME=default MASTER_ADDR=node-0.example MASTER_PORT=29500
    TORCHELASTIC_RESTART_COUNT=0 TORCHELASTIC_MAX_RESTARTS=0 TORCHELASTIC_RUN_ID=none""")

# Kubeflow's, one process a pod.
PYTORCH_JOB = of(
    "MASTER_ADDR=mnist-master-0 MASTER_PORT=23456 WORLD_SIZE=3 RANK=2 PYTHONUNBUFFERED=1"
)

KERAS = of("""KERAS_DISTRIBUTION_JOB_ADDRESSES=10.0.0.1:1234,10.0.0.2:2345
    KERAS_DISTRIBUTION_NUM_PROCESSES=2 KERAS_DISTRIBUTION_PROCESS_ID=1""")

# Kubeflow Trainer 2.2's runtime for JAX, of a TrainJob `digits`.
JAX = of("""JAX_NUM_PROCESSES=3 JAX_PROCESS_ID=2 JAX_COORDINATOR_ADDRESS=digits-node-0-0.digits:6666
    JAX_COORDINATOR_PORT=6666 JAX_DISTRIBUTED_BACKEND=gloo JOB_COMPLETION_INDEX=2""")

SKYPILOT = of(
    """SKYPILOT_TASK_ID=sky-2026-11-25-02-31-22-000000_digits_1 SKYPILOT_NODE_RANK=1
    SKYPILOT_NUM_NODES=3 SKYPILOT_NUM_GPUS_PER_NODE=8""",
    SKYPILOT_NODE_IPS="10.0.0.4\n10.0.0.7\n10.0.0.5",
)

# Of `sbatch --nodes=4 --ntasks=7`.
SLURM_JOB = of("""SLURM_JOB_ID=184213 SLURM_JOBID=184213 SLURM_JOB_NODELIST=gpu[008-010],login7
    SLURM_NODELIST=gpu[008-010],login7 SLURM_JOB_NUM_NODES=4 SLURM_NTASKS=7 SLURM_NPROCS=7
    SLURM_TASKS_PER_NODE=2(x3),1""")

# The script of sbatch, before any srun.
SLURM_SCRIPT = SLURM_JOB | of("SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0 SLURM_TASK_PID=4711")

# `srun python train.py` in it.
SLURM_STEP = SLURM_JOB | of("""SLURM_STEP_ID=0 SLURM_STEPID=0
    SLURM_STEP_NODELIST=gpu[008-010],login7 SLURM_STEP_NUM_NODES=4 SLURM_STEP_NUM_TASKS=7
    SLURM_STEP_TASKS_PER_NODE=2(x3),1 SLURM_PROCID=3 SLURM_LOCALID=1 SLURM_NODEID=1
    SLURM_LAUNCH_NODE_IPADDR=10.1.0.8 SLURM_DISTRIBUTION=block""")

# The shell of `salloc` where the site makes it a step.
SLURM_INTERACTIVE = SLURM_JOB | of("""SLURM_STEP_ID=4294967290 SLURM_STEP_NUM_TASKS=1
    SLURM_STEP_NODELIST=gpu008 SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0""")

OPEN_MPI_5 = of("""OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2
    OMPI_COMM_WORLD_NODE_RANK=1 OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 OMPI_UNIVERSE_SIZE=2
    OMPI_VERSION=5.0.11 PMIX_HOSTNAME=vm PMIX_NAMESPACE=prterun-vm-9204@1 PMIX_RANK=1
    PMIX_SERVER_URI41=prterun-vm-9204@0.0;tcp4://127.0.0.1:56701 PRTE_LAUNCHED=1""")

OPEN_MPI_4 = of("""OMPI_COMM_WORLD_LOCAL_RANK=0 OMPI_COMM_WORLD_LOCAL_SIZE=1
    OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 PMIX_NAMESPACE=1531576321 PMIX_RANK=1
    OMPI_MCA_orte_hnp_uri=1531576320.0;tcp://10.96.0.1,10.148.0.1:34911""")

MPICH = of("""HYDI_CONTROL_FD=7 MPI_LOCALNRANKS=2 MPI_LOCALRANKID=1 PMI_FD=11 PMI_HOSTNAME=vm
    PMI_RANK=1 PMI_SIZE=2""")

INTEL_MPI = of("""HYDRA_BSTRAP_LOCALHOST=vm I_MPI_MPIRUN=mpirun MPI_LOCALNRANKS=2 MPI_LOCALRANKID=1
    I_MPI_HYDRA_UUID=19240000-ec41-1ee7-b660-06009759fa33 PMI_FD=11 PMI_RANK=1 PMI_SIZE=2""")

# An indexed Job `digits`, whose manifest has the two of ours.
KUBERNETES = of("""KUBERNETES_SERVICE_HOST=10.96.0.1 HOSTNAME=digits-2 JOB_COMPLETION_INDEX=2
    KERASDIST_WORKERS=3 KERASDIST_SERVICE=digits-pods""")

# JobSet `digits`, replicated job `workers`, first and only job.
JOBSET = of("""KUBERNETES_SERVICE_HOST=10.96.0.1 HOSTNAME=digits-workers-0-1 JOB_COMPLETION_INDEX=1
    KERASDIST_WORKERS=2 KERASDIST_SERVICE=digits""")

# GKE, one slice of four hosts.
CLOUD_TPU = of("""TPU_WORKER_ID=3 TPU_WORKER_HOSTNAMES=t-0.svc,t-1.svc,t-2.svc,t-3.svc
    TPU_TOPOLOGY=4x4 TPU_ACCELERATOR_TYPE=v5litepod-16""")

CLOUD_TPU_SLICES = of("""TPU_WORKER_ID=1 TPU_WORKER_HOSTNAMES=s-1-0.svc,s-1-1.svc
    MEGASCALE_NUM_SLICES=3 MEGASCALE_SLICE_ID=2 MEGASCALE_COORDINATOR_ADDRESS=s-0-0.svc:8080""")
