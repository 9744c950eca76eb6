"""Limits how far the host runs ahead of the devices.

On accelerators JAX's own limit is enough. On several CPU devices JAX can deadlock. Each device
lets 32 programs be in flight (``max_inflight_computations_per_device`` in XLA's CPU client), and
the launch of the next one waits for its turn *inside* the thread pool that also runs the programs.
The pool has as many threads as there are cores, or devices if they are more. On two cores, one
thread waits there for a launch, the other in an all-reduce for its partner, and the partner finds
no thread: "Expected 2 threads to join the rendezvous, but only 1 of them arrived", and after 40
seconds XLA aborts the process. The stacks of a stopped process show
``xla::Semaphore::Acquire`` under ``ExecuteLaunch`` on one worker,
``InProcessCommunicator::AllReduce`` on the other. A larger pool (``NPROC=8``) prevents the
deadlock, and so do fewer programs in flight. Seen with jaxlib 0.10.2.
"""

from __future__ import annotations

import itertools

import jax

# So many are in flight at most, well below 32, since callbacks and user code launch programs, too.
_STRIDE = 8

STEPS_AHEAD = _STRIDE
"""After so many steps the host has waited for the device at least once."""


# All strategies of a process launch into the same queues.
_launches = itertools.count(1)


def wait_sometimes(outputs: object, state: object) -> None:
    """Counts a launch; waits for its outputs if it is the next that is waited for."""
    if next(_launches) % _STRIDE == 0:
        leaves = jax.tree.leaves((outputs, state))
        there = (one for one in leaves if isinstance(one, jax.Array) and not one.is_deleted())
        jax.block_until_ready(next(there, None))
