"""How far the host may run ahead of the devices.

Everywhere but on the CPU: as far as JAX lets it. On several CPU devices JAX can stop for good. Each device
lets 32 programs be in flight (``max_inflight_computations_per_device`` in XLA's CPU client), and the launch
of the next one waits for its turn *inside* the thread pool that also runs the programs. The pool has as
many threads as there are cores, or devices if they are more. On two cores, one thread waits there for a
launch, the other in an all-reduce for its partner, and the partner finds no thread: "Expected 2 threads to
join the rendezvous, but only 1 of them arrived", and after 40 seconds XLA aborts the process. Found by the
stacks of the stopped process: ``xla::Semaphore::Acquire`` under ``ExecuteLaunch`` on one worker,
``InProcessCommunicator::AllReduce`` on the other; a larger pool (``NPROC=8``) or fewer programs in flight
end it. Seen with jaxlib 0.10.2.
"""

from __future__ import annotations

from typing import Any, final

import jax

# Steps until the host waits for the devices. Well below 32: two models may train at a time, and callbacks
# launch programs too.
_STEPS_AHEAD = 12


@final
class FreeFlow:
    """Does not wait."""

    def after_launch(self, results: Any) -> None:
        """Does nothing.

        Args:
            results: What the step returned.
        """


@final
class BoundedFlow:
    """Waits now and then, so that the launches never fill the devices' queues."""

    def __init__(self) -> None:
        """Starts counting."""
        self._ahead = 0

    def after_launch(self, results: Any) -> None:
        """Notes a launch, and waits for it if it is one too many.

        Args:
            results: What the step returned: arrays that are ready when it has ended.
        """
        self._ahead += 1
        if self._ahead >= _STEPS_AHEAD:
            self._ahead = 0
            jax.block_until_ready(jax.tree.leaves(results)[:1])
