"""The checks that are the same on all backends.

Most of them check arguments, such as the axis along which to gather. `meeting_at` checks that all
workers do the same with a sharded variable.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, SupportsIndex

import keras

from kerasdist.agreement.results import unnumbered
from kerasdist.api.options import CommunicationOptions
from kerasdist.core.sharding import Sharding
from kerasdist.core.user_warnings import warn_user
from kerasdist.errors import DisagreementError, JobError, ReplicaError, ShapeError, UnsupportedError
from kerasdist.job.comparison import NAMED
from kerasdist.job.job import Job


def check_summable(dtype: str) -> None:
    """Refuses to sum booleans over the replicas, because the frameworks' results differ."""
    if dtype == "bool":
        raise not_summable(dtype, "int32")


def not_summable(dtype: str, wider: str) -> TypeError:
    """Returns the error for a type that cannot be summed; `wider` is a type to cast to."""
    return TypeError(
        f"Expected numbers to add over the replicas. Received: dtype={dtype}. Cast them first, "
        f"with keras.ops.cast(x, {wider!r})."
    )


@contextmanager
def meeting_at(
    variable: keras.Variable,
    work: str,
    job: Job | None,
    checksum: Callable[[], object] = lambda: None,
) -> Generator[None]:
    """Waits until all workers of a job begin some work on a sharded variable, such as a read.

    If workers begin different work, the job ends with an error that names the work of each. If the
    work is an assignment, `checksum` returns the checksum of the assigned value, and a difference
    between the workers' checksums raises an error.
    """
    if job is None:
        yield
        return
    label = f"{work} of the sharded variable {unnumbered(variable.path)!r}"
    with job.translating_failures(label):
        if not job.all_have_one(label, checksum()):
            raise DisagreementError(
                f"{job.who} Expected all workers to assign the same value to a sharded variable, "
                f"of which each holds a part. Received: values that differ for {variable.path!r}. "
                "Load weights on all workers, and let callbacks assign the same values on all "
                "workers."
            )
        yield


def differing_calls(received: str) -> ReplicaError:
    """Returns the error for replicas that do not all make the same calls."""
    return ReplicaError(
        f"Expected all replicas to do the same at the same time. Received: {received}. Replicas "
        "differ in their batch only: a branch that depends on the data must not decide whether "
        "they call the optimizer, a metric or a collective, nor with which shapes and variables."
    )


def started_too_early(job: Job, framework: str) -> JobError:
    """Returns the error for a framework that has started before it can join the other workers."""
    return JobError(
        f"{job.who} Expected the job's strategy before {framework} starts, so that it can join the "
        f"other workers. Received: {framework} has made a tensor, or has looked for its devices, "
        "already. Make the strategy at the top of the script, before any model, tensor or random "
        "seed."
    )


def count_hosts(sharding: Any, job: Job | None, replicas: int) -> int:
    """Returns the number of machines, if each machine holds all state, divided over its devices.

    Returns 1 if the state is divided over the devices of all machines. Refuses to divide state
    within machines that have one device each. All workers must call this function.
    """
    if job is None or not isinstance(sharding, Sharding) or sharding.within is None:
        return 1
    hosts = job.num_workers // job.workers_a_host()
    if hosts == replicas > 1:
        raise UnsupportedError(
            "Expected several devices on each machine, to shard state within a machine. Received: "
            f"within='host', with {replicas} devices on {hosts} machines. Leave out `within` of "
            "kerasdist.Sharding."
        )
    return hosts


def checked_axis(tensor: Any, axis: int) -> int:
    """Returns an axis of a tensor, counted from 0; a negative axis counts from the end."""
    rank = len(tensor.shape)
    if not isinstance(axis, SupportsIndex):
        raise TypeError(
            f"Expected axis to be an integer. Received: axis={axis!r}. Give the number of an axis."
        )
    if not -rank <= axis < rank:
        raise ValueError(
            f"Expected axis to be one of the tensor's {rank}. Received: axis={axis}, "
            f"shape={tuple(tensor.shape)}. Give a scalar an axis first, with "
            "keras.ops.expand_dims(x, 0)."
        )
    return axis % rank


def axis_of_rows(tensor: Any, axis: int) -> int:
    """Returns the axis along which to gather a tensor, counted from 0; refuses IndexedSlices."""
    if type(tensor).__name__ == "IndexedSlices":
        raise UnsupportedError(
            "Expected a dense tensor to gather. Received: value of type tf.IndexedSlices. Convert "
            "it in the replica with tf.convert_to_tensor, or gather its values and its indices."
        )
    return checked_axis(tensor, axis)


def checked_axes(tensor: Any, axis: int | Sequence[int]) -> tuple[int, ...]:
    """Checks one or several axes of a tensor; returns them as a tuple, counted from 0."""
    several = axis if isinstance(axis, Sequence) else (axis,)
    axes = tuple(checked_axis(tensor, one) for one in several)
    if not axes or len(set(axes)) < len(axes):
        raise ValueError(
            f"Expected axis to be an axis, or several different ones. Received: axis={axis!r}. "
            "Give each axis once, or None to reduce over the replicas only."
        )
    return axes


def check_shapes(shapes: Sequence[Sequence[int | None] | None], axis: int | None = None) -> None:
    """Raises ShapeError if the replicas' shapes differ, other than in their sizes along `axis`."""
    known = [shape for shape in shapes if shape is not None]
    ranks = {len(shape) for shape in known}
    columns = zip(*known, strict=True) if len(ranks) < 2 else ()
    sizes = [set(column) - {None} for column in columns]
    if len(ranks) < 2 and all(len(one) < 2 or at == axis for at, one in enumerate(sizes)):
        return
    but = "" if axis is None else f", but for their size along axis {axis}"
    advice = (
        "Pad or reduce them first, or give the axis along which they differ."
        if axis is None
        else "Give the axis along which they differ, or pad them first."
    )
    shown = [None if shape is None else tuple(shape) for shape in shapes[:NAMED]]
    more = f" and {len(shapes) - NAMED} others" if len(shapes) > NAMED else ""
    raise ShapeError(
        f"Expected tensors of the same shape from all replicas{but}. Received: shapes={shown}"
        f"{more}. {advice}"
    )


@cache
def check_communication(options: CommunicationOptions, on: str, heeded: tuple[str, ...]) -> None:
    """Checks that a backend uses the options that are set; `heeded` names the options it uses.

    Raises an error if compression is set but not used. Warns if another option is set but not used.
    """
    if options.compression is not None and "compression" not in heeded:
        raise UnsupportedError(
            f"Expected CommunicationOptions without compression on {on}. Received: "
            f"compression={options.compression!r}. Leave it out, or use PyTorch; "
            "mixed_float16 and mixed_bfloat16 policies compute in smaller types on each backend."
        )
    plain = CommunicationOptions(compression=options.compression)
    given = {
        name: getattr(options, name)
        for name in ("bytes_per_pack", "implementation", "timeout_seconds")
        if name not in heeded and getattr(options, name) != getattr(plain, name)
    }
    if given:
        warn_user(
            f"Expected CommunicationOptions without {', '.join(given)} on {on}, where they have no "
            f"effect. Received: {given}. Leave them out; KERASDIST_MEETING_TIMEOUT says how long "
            "workers wait for each other."
        )
