"""How the workers' JAX processes become one: `jax.distributed`, with our time-outs."""

from __future__ import annotations

import math
import socket
from collections.abc import Callable
from typing import Any

import jax
from jax.core import Tracer

from kerasdist import keras_seam
from kerasdist.backends.jax.relay import Relay
from kerasdist.errors import JobError
from kerasdist.job import network, threads
from kerasdist.job.job import Job
from kerasdist.job.watch import GRACE_SECONDS

# Our watch notices a lost worker first, and names it; JAX would end all processes without a name.
_LATER = 20

# What JAX says where it has started (0.10).
_TOO_LATE = "must be called before any JAX calls"


def connect(job: Job) -> None:
    """Starts JAX's coordination between the workers. All workers must call it.

    Args:
        job: The job of this process.

    Raises:
        JobError: If JAX has started, or the chief cannot be reached.
    """
    # It would take SIGTERM for itself, by which schedulers and users end a process.
    jax.config.update("jax_enable_preemption_service", False)
    service = job.addresses[0]
    way = service
    interfaces = "127.0.0.1" if job.is_on_one_machine else "[::]"
    if job.is_chief:
        job.own_port()  # JAX ends the process without an error where its port is taken
    else:
        relay = Relay(service, job.timeouts.join)
        way = relay.address
        job.at_leave(relay.close)  # after JAX, which takes its leave by it
    try:
        jax.distributed.initialize(
            coordinator_address=way,
            num_processes=job.num_workers,
            process_id=job.rank,
            cluster_detection_method="deactivate",  # kerasdist has found the workers
            coordinator_bind_address=f"{interfaces}:{service.rpartition(':')[2]}",
            initialization_timeout=math.ceil(job.timeouts.join),
            heartbeat_timeout_seconds=math.ceil(_LATER * job.timeouts.heartbeat),
            # Later than a failed worker ends by itself: here JAX aborts it.
            shutdown_timeout_seconds=math.ceil(job.timeouts.heartbeat + GRACE_SECONDS),
        )
    except RuntimeError as error:
        who = f"[worker {job.rank}/{job.num_workers}]"
        if _TOO_LATE in str(error):
            # JAX's own traceback would come first, and says no more than this.
            raise JobError(
                f"{who} Expected the job's strategy before JAX starts. Received: JAX has made an "
                "array, or has looked for its devices, already. Make the strategy at the top of "
                "the script, before arrays, models and random seeds."
            ) from None
        raise JobError(
            f"{who} Expected to connect JAX with the chief at {service}. Received: "
            f"{str(error).rstrip('.')}. Let the chief's port be reached."
        ) from error
    job.at_leave(jax.distributed.shutdown)
    with threads.waiting_their_turn():
        jax.local_devices()  # starts JAX, and with it Gloo
    keras_seam.install_to_numpy(_to_numpy)


def _to_numpy(original: Callable[..., Any], array: Any) -> Any:
    """Waits where Ctrl-C is heard: NumPy drops the interrupt that comes while it waits for JAX.

    Seen with NumPy 2.4 and JAX 0.10: the loop of ``fit`` waits there for most of each step, and
    went on after Ctrl-C.
    """
    if isinstance(array, jax.Array) and not isinstance(array, Tracer):
        array.block_until_ready()
    return original(array)


def check_way_back(job: Job) -> None:
    """Complains where the others could not reach JAX's sums on CPUs, rather than wait for them.

    Args:
        job: The job of this process.

    Raises:
        JobError: If the machine's name is a loopback address, and other workers are elsewhere. JAX
            offers no way to say another address (0.10).
    """
    address = network.misleads(job.addresses, job.rank)
    if address is not None:
        name = socket.gethostname()
        raise JobError(
            f"[worker {job.rank}/{job.num_workers}] Expected the name of this machine to be an "
            "address at which other machines reach it: JAX sums there, on CPUs. Received: "
            f"{name!r}, which is {socket.gethostbyname(name)}. Write {address} behind the name, in "
            "/etc/hosts."
        )
