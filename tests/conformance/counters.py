"""Counts what should be rare: traces and compilations, and steps in which the host waits.

Each framework tells of them in its own way, in part by private names: a test may use those.
"""

import contextlib
import functools
import threading
from bisect import bisect
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

# Operations of torch that end when the host has a value of the device.
TORCH_WAITS = ("aten::_local_scalar_dense", "aten::nonzero")
MARK = "kerasdist: a step has been launched"


class Traces:
    """How often a function was traced, and on JAX lowered and compiled too, cached or not."""

    def __init__(self):
        self.count = 0


class Reads:
    """How many values the host had taken from the devices, after each step."""

    def __init__(self):
        self.after_steps: list[int] = []

    @property
    def per_step(self) -> float:
        """From the first step to the last: what starts and ends an epoch does not count."""
        first, *_, last = self.after_steps
        return (last - first) / (len(self.after_steps) - 1)


def traces(backend: str) -> contextlib.AbstractContextManager[Traces]:
    return {"tensorflow": _tensorflow_traces, "jax": _jax_traces}[backend]()


def reads(backend: str, model: Any, function: str) -> contextlib.AbstractContextManager[Reads]:
    """Counts while the model runs ``function``, such as ``train_function``, which it has already.

    On TensorFlow and JAX these are reads by the calling thread: Keras's callbacks read logs in a
    thread of their own, for which no step waits. On torch they are those of all threads, since
    replicas are threads. Not seen is ``np.asarray`` of TensorFlow's tensors and of JAX's arrays on
    a single device, which read memory past Python.
    """
    counting = {"tensorflow": _tensorflow_reads, "jax": _jax_reads, "torch": _torch_reads}
    return counting[backend](model, function)


@contextlib.contextmanager
def _tensorflow_traces() -> Iterator[Traces]:
    from tensorflow.python.framework import func_graph

    # Every function, and every branch and loop in one, goes through here.
    counted, original = Traces(), func_graph.func_graph_from_py_func

    @functools.wraps(original)
    def trace(*args, **kwargs):
        counted.count += 1
        return original(*args, **kwargs)

    with mock.patch.object(func_graph, "func_graph_from_py_func", trace):
        yield counted


@contextlib.contextmanager
def _jax_traces() -> Iterator[Traces]:
    import jax
    from jax._src import monitoring

    counted = Traces()

    def listen(event, duration, **_):
        counted.count += event.startswith("/jax/core/compile/")

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield counted
    finally:
        monitoring.unregister_event_duration_listener(listen)


def _tensorflow_reads(model, function) -> contextlib.AbstractContextManager[Reads]:
    from tensorflow.python.framework import ops

    return _reads_of_caller(ops._EagerTensorBase, "_numpy", model, function)


def _jax_reads(model, function) -> contextlib.AbstractContextManager[Reads]:
    from jax._src.array import ArrayImpl

    return _reads_of_caller(ArrayImpl, "_value", model, function)


@contextlib.contextmanager
def _reads_of_caller(kind: Any, name: str, model: Any, function: str) -> Iterator[Reads]:
    """Counts what this thread reads by a method, or by a property."""
    seen, caller, original = [], threading.get_ident(), vars(kind)[name]
    is_property = isinstance(original, property)
    read = original.fget if is_property else original

    def noted(self):
        if threading.get_ident() == caller:
            seen.append(self)
        return read(self)

    counted = Reads()
    with (
        mock.patch.object(kind, name, property(noted) if is_property else noted),
        _marked(model, function, lambda: counted.after_steps.append(len(seen))),
    ):
        yield counted


@contextlib.contextmanager
def _torch_reads(model, function) -> Iterator[Reads]:
    from torch._C._profiler import _ExperimentalConfig
    from torch.profiler import ProfilerActivity, profile, record_function

    def mark():
        with record_function(MARK):
            pass

    counted = Reads()
    everywhere = _ExperimentalConfig(profile_all_threads=True)
    with (
        _marked(model, function, mark),
        profile(activities=[ProfilerActivity.CPU], experimental_config=everywhere) as profiled,
    ):
        yield counted
    events = [(event.name, event.time_range.start) for event in profiled.events()]
    seen = sorted(start for name, start in events if name in TORCH_WAITS)
    counted.after_steps = [bisect(seen, mark) for mark in sorted(s for n, s in events if n == MARK)]


@contextlib.contextmanager
def _marked(model: Any, function: str, mark: Callable[[], None]) -> Iterator[None]:
    """Calls ``mark`` after each call of the model's function, which may be a step or several."""
    original = getattr(model, function)

    def marked(*args, **kwargs):
        result = original(*args, **kwargs)
        mark()
        return result

    with mock.patch.object(model, function, marked):
        yield
