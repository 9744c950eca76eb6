"""Whether the weights of a model are the same on all workers."""

from __future__ import annotations

import hashlib
from typing import Any

from kerasdist import keras_compat
from kerasdist.agreement.measures import difference, measures_of, rounding_of
from kerasdist.backends.base.interface import ReplicaSet
from kerasdist.core.user_warnings import warn_user
from kerasdist.errors import DisagreementError
from kerasdist.input.batch_forms import first_difference
from kerasdist.job.comparison import described_difference
from kerasdist.keras_compat import ops


def require_equal_batches(replicas: ReplicaSet, when: str) -> None:
    """Raises DisagreementError if workers trained on different batches since the last call.

    All workers must call it.
    """
    job = replicas.job
    if job is None:
        return
    runs = replicas.batch_history.end()
    read = replicas.first_batches.take_checksums()
    facts = [
        _digest(runs),
        _digest(sorted((count, sums.tobytes()) for count, sums in read.items())),
    ]
    everyone = job.all_gather_object(f"batches before {when}", facts)
    replicas.batch_history.clear()
    if all(one == facts for one in everyone):
        return
    if len({sizes for sizes, _ in everyone}) == 1:
        replicas.first_batches.require_equal_checksums(read, when)
        return
    step, forms = first_difference(job.all_gather_object(f"sizes of batches before {when}", runs))
    said = described_difference([{f"batch {step}": form} for form in forms])
    raise DisagreementError(
        f"[worker {job.rank}/{job.num_workers}] Expected all workers to train on the same batches "
        f"before {when}. Received: {said}. All workers read the same data, and each takes its rows "
        "of every batch. If each worker has data of its own, pass a dataset with "
        "InputOptions(auto_shard_policy=AutoShardPolicy.OFF)."
    )


def _digest(facts: Any) -> str:
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def require_equal(model: Any, replicas: ReplicaSet, when: str) -> None:
    """Raises DisagreementError if a model or its optimizer has different values on workers.

    All workers must call it. Values that differ by no more than rounding become the chief's.
    """
    job = replicas.job
    if job is None:
        return
    variables = _variables(model)
    sums = replicas.checksums(variables)
    if job.all_have_one(f"weights at {when}", _digest(sums)):
        return
    everyone = job.all_gather_object(f"checksums at {when}", sums)
    lengths = {len(theirs) for theirs in everyone}
    if len(lengths) > 1:
        said = described_difference([{"number of variables": len(theirs)} for theirs in everyone])
        raise _disagreement(replicas, when, said)
    apart = [index for index, one in enumerate(zip(*everyone, strict=True)) if len(set(one)) > 1]
    own = [measures_of(ops.convert_to_numpy(variables[index])) for index in apart]
    measures = job.all_gather_object(f"sizes of what differs at {when}", own)
    largest = 0.0
    for number, index in enumerate(apart):
        chiefs, *others = [theirs[number] for theirs in measures]
        between = max(difference(theirs, chiefs) for theirs in others)
        largest = max(largest, between)
        rounding = rounding_of(variables[index].dtype)
        if between > rounding:
            values = [
                {variables[index].path: f"norm {theirs[number][0]:.9g} ({sums[index]:08x})"}
                for theirs, sums in zip(measures, everyone, strict=True)
            ]
            said = (
                f"{described_difference(values)}: apart by {between:.2g} of its size, more than "
                f"rounding ({rounding:.2g})"
            )
            raise _disagreement(replicas, when, said, len(apart) - 1)
    replicas.equalize([variables[index] for index in apart])
    warn_user(
        f"{len(apart)} variables of the model {model.name!r} differed by rounding between workers "
        f"at {when}, by {largest:.2g} of their size at most, first {variables[apart[0]].path!r}; "
        "all workers go on with the chief's. It comes from machines or numbers of threads that are "
        "not alike."
    )


def _variables(model: Any) -> list[Any]:
    """Returns the variables to compare: training alone changes them, alike on all workers."""
    optimizer = model.optimizer if model.compiled else None
    known = [*model.variables, *(optimizer.variables if optimizer is not None else ())]
    return [
        one
        for one in {id(variable): variable for variable in known}.values()
        # Each worker has its own part of a metric; moving statistics are the same on all.
        if (one.synchronization != "on_read" or one.aggregation == "mean")
        and keras_compat.stored_value(one) is not None
        # Not the seeds of layers that augment data: pipelines of workers run ahead differently.
        and not one.path.endswith("seed_generator_state")
    ]


def _disagreement(replicas: ReplicaSet, when: str, said: str, more: int = 0) -> DisagreementError:
    job = replicas.job
    assert job is not None
    further = f" ({more} more variables differ)" if more else ""
    return DisagreementError(
        f"[worker {job.rank}/{job.num_workers}] Expected all workers to have the same weights at "
        f"{when}. Received: {said}{further}. Something has changed them on some workers alone, "
        "such as `assign` in a callback. Do the same on all workers, or send the chief's to all: "
        "kerasdist.callbacks.BroadcastGlobalVariables."
    )
