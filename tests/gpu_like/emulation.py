"""What is different on accelerators, put onto CPU devices.

- PyTorch: batches are placed ahead; autograd runs in a thread per replica, as in a GPU's own
  thread; each replica but the first copies the variables; kernels for the CPU alone are not used.
- TensorFlow: devices share no memory, so that sums are collectives.
- JAX: batches are placed while the step before is still running.

It reaches into private parts of the package. Each must be there, or the emulation raises.
"""

import queue
import threading
from typing import Any


def install(backend: str) -> None:
    """Puts the differences into the package, for the rest of the process."""
    {"tensorflow": _tensorflow, "jax": _jax, "torch": _torch}[backend]()


def _replace(owner: Any, name: str, value: Any) -> Any:
    """Sets an attribute, and returns the one that was there: a renamed part must not be missed."""
    original = getattr(owner, name)
    setattr(owner, name, value)
    return original


def _tensorflow() -> None:
    from kerasdist.backends.tensorflow.replica import replicas

    _replace(replicas, "_share_memory", lambda devices: False)


def _jax() -> None:
    from kerasdist.backends.jax.mesh import placement

    def init(self, *args, **named):
        original(self, *args, **named)
        assert self.places_ahead is False
        self.places_ahead = True

    original = _replace(placement.Placement, "__init__", init)


def _torch() -> None:
    from kerasdist.backends.torch.replica import replicas

    _replace(replicas.TorchReplicaSet, "on_cpu", property(lambda self: False))
    _copy_variables()
    _run_backward_elsewhere()


def _copy_variables() -> None:
    from kerasdist.backends.torch.state import variables

    def init(self, rank, device, *, copies, **options):
        assert not copies
        original(self, rank, device, copies=rank != 0, **options)

    original = _replace(variables.ReplicaScope, "__init__", init)


class _Engine(threading.Thread):
    """Runs the backward passes of one thread, as torch's thread of a GPU does."""

    current = threading.local()

    def __init__(self):
        super().__init__(daemon=True)
        self._calls = queue.SimpleQueue()
        self.start()

    def run(self):
        self.current.is_engine = True
        while True:
            function, results, done = self._calls.get()
            try:
                results.append((function(), None))
            except BaseException as error:  # noqa: BLE001 (raised again where it was called)
                results.append((None, error))
            function = None  # nothing of the step lives on until the next one
            done.set()

    def call(self, function):
        results, done = [], threading.Event()
        self._calls.put((function, results, done))
        done.wait()
        value, error = results.pop()
        if error is not None:
            raise error
        return value


def _run_backward_elsewhere() -> None:
    import torch.autograd
    import torch.autograd.graph

    def run_backward(*args, **kwargs):
        here = _Engine.current
        if getattr(here, "is_engine", False):  # a pass within a pass stays in the thread
            return original(*args, **kwargs)
        if not hasattr(here, "engine"):
            here.engine = _Engine()
        return here.engine.call(lambda: original(*args, **kwargs))

    original = _replace(torch.autograd, "_engine_run_backward", run_backward)
    _replace(torch.autograd.graph, "_engine_run_backward", run_backward)
