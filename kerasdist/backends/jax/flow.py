"""How far the host may run ahead of the devices.

Everywhere but on the CPU: as far as JAX lets it. On several CPU devices JAX can stop for good. Each
device lets 32 programs be in flight (``max_inflight_computations_per_device`` in XLA's CPU client),
and the launch of the next one waits for its turn *inside* the thread pool that also runs the
programs. The pool has as many threads as there are cores, or devices if they are more. On two
cores, one thread waits there for a launch, the other in an all-reduce for its partner, and the
partner finds no thread: "Expected 2 threads to join the rendezvous, but only 1 of them arrived",
and after 40 seconds XLA aborts the process. The stacks of a stopped process show
``xla::Semaphore::Acquire`` under ``ExecuteLaunch`` on one worker,
``InProcessCommunicator::AllReduce`` on the other. A larger pool (``NPROC=8``) ends it, and so do
fewer programs in flight. Seen with jaxlib 0.10.2.
"""

from __future__ import annotations

from typing import Any, final

import jax

# Launches from one mark to the next. So at most twice as many steps are in flight, well below 32:
# callbacks and the user's own code launch programs too.
_STRIDE = 8


@final
class FreeFlow:
    """Does not wait."""

    def after_launch(self, outputs: Any, state: Any) -> None:
        """Does nothing.

        Args:
            outputs: The outputs of the step.
            state: The state that the next step will consume.
        """


@final
class BoundedFlow:
    """Waits now and then for a step of a while ago, so that the queue is neither empty nor full."""

    def __init__(self) -> None:
        """Starts counting."""
        self._launches = 0
        self._mark: list[Any] = []

    def after_launch(self, outputs: Any, state: Any) -> None:
        """Counts a launch, and waits if the devices are too far behind.

        Args:
            outputs: The outputs of the step.
            state: The state that the next step will consume.
        """
        self._launches += 1
        if self._launches < _STRIDE:
            return
        self._launches = 0
        jax.block_until_ready(self._mark)
        self._mark = jax.tree.leaves(outputs)[:1]
        if not self._mark:  # nothing of this step survives the next one, so it is now or never
            jax.block_until_ready(jax.tree.leaves(state)[:1])


# All strategies of a process launch into the same queues.
ALL_CPUS = BoundedFlow()
