"""A job on a Ray cluster."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import ray
from ray import cloudpickle
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from kerasdist.cli.launch import report
from kerasdist.cli.launch.spec import AttemptResult, JobSpec, WorkerExit
from kerasdist.cli.launch.worker import Screen
from kerasdist.errors import ClusterError
from kerasdist_ray.attempt import run_once
from kerasdist_ray.errors import RayJobError
from kerasdist_ray.process import Answer

Result = TypeVar("Result")


def run_on_ray(
    fn: Callable[..., Result],
    num_workers: int,
    resources: Mapping[str, float] | None = None,
    env: Mapping[str, str] | None = None,
    *,
    max_restarts: int = 0,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    placement_seconds: float = 300.0,
) -> list[Result]:
    """Runs ``fn(*args, **kwargs)`` as every worker of a job, and returns what they return.

    Each worker is a fresh process, on a place that Ray has given it. The function imports Keras by
    itself, and makes a `kerasdist.MultiWorkerMirroredStrategy`.

    Example::

        results = run_on_ray(train, num_workers=4, resources={"CPU": 8, "GPU": 1},
                             env={"KERAS_BACKEND": "jax"}, max_restarts=2)

    Args:
        fn: What a worker does. Ray's cloudpickle carries it.
        num_workers: How many workers.
        resources: What Ray gives to each of them; by default, one CPU.
        env: More variables for the workers. Of this process's they get those that configure the
            frameworks, such as ``KERAS_BACKEND`` and those that begin with ``NCCL_``.
        max_restarts: How often the whole job is started again after a failure.
        args: What the function gets.
        kwargs: What it gets by name.
        placement_seconds: How long to wait, at each start, until the cluster has room for all
            workers at once.

    Returns:
        What each worker has returned, by rank.

    Raises:
        RayJobError: If a worker fails and no restart is left. The message tells which one failed
            first, its error's type, and the traceback.
        ClusterError: If the cluster has no room for the workers.
        JobError: If Ray does not start them.
    """
    if num_workers < 1:
        raise ClusterError(f"Expected one worker at least. Received: num_workers={num_workers}.")
    bundle = _bundle(resources)
    # Loaded in the workers' processes alone, so here it is no more than bytes.
    call = ray.put(cloudpickle.dumps((fn, tuple(args), dict(kwargs or {}))))
    group = placement_group([bundle] * num_workers, strategy="PACK")
    try:
        _wait_for_room(group, bundle, placement_seconds)
        spec = JobSpec((), num_workers, max_restarts=max_restarts, environment=dict(env or {}))
        result, answers, starts = _run(spec, group, call, placement_seconds)
    finally:
        remove_placement_group(group)
    if result.exit_code:
        raise _error(result, answers, starts)
    return [_value(answer, rank, num_workers) for rank, answer in enumerate(answers)]


def _bundle(resources: Mapping[str, float] | None) -> dict[str, float]:
    given = {"CPU": 1.0} if resources is None else dict(resources)
    bundle = {name: amount for name, amount in given.items() if amount}
    if not bundle or min(bundle.values()) < 0:
        raise ClusterError(
            "Expected what each worker needs, such as {'CPU': 4, 'GPU': 1}. Received: "
            f"resources={given}."
        )
    return bundle


def _wait_for_room(group: PlacementGroup, bundle: Mapping[str, float], seconds: float) -> None:
    if group.wait(seconds):
        return
    all_of, free = ray.cluster_resources(), ray.available_resources()
    raise ClusterError(
        f"Expected room for {group.bundle_count} workers at once, within {seconds:g} s. Received: "
        f"resources={dict(bundle)} for each; the cluster has "
        f"{ {name: all_of.get(name, 0.0) for name in bundle} }, and free of these are "
        f"{ {name: free.get(name, 0.0) for name in bundle} }. Ask for less, or raise "
        "placement_seconds."
    )


def _run(
    spec: JobSpec, group: PlacementGroup, call: Any, seconds: float
) -> tuple[AttemptResult, list[Answer], int]:
    """Runs a job, again where that is allowed; returns its last attempt, and how many it took."""
    screen = Screen()
    starts = 0
    while True:
        result, answers = run_once(spec, starts, group, call, seconds)
        screen.say(report.of_attempt(result, spec, starts))
        starts += 1
        if not result.failed or starts > spec.max_restarts:
            return result, answers, starts
        screen.say(f"starting the job again, {starts} of {spec.max_restarts}")


def _value(answer: Answer, rank: int, workers: int) -> Any:
    if answer.value is None:
        raise RayJobError(
            f"[worker {rank}/{workers}] Expected the function to return. Received: exit code 0, "
            "without a result. Return, in place of sys.exit or os._exit.",
            rank,
            0,
        )
    return cloudpickle.loads(answer.value)


def _error(result: AttemptResult, answers: Sequence[Answer], starts: int) -> RayJobError:
    cause = cast("WorkerExit", result.cause)  # there is one where an exit code is not 0
    failure = answers[cause.rank].failure
    if failure is None:
        brief, lines = cause.reason, ["Its last lines:", *cause.last_lines]
    else:
        brief, lines = failure.error, failure.trace.splitlines()
    if result.preempted:
        advice = "Call run_on_ray again: BackupAndRestore lets the function go on where it was."
    elif starts > 1:
        advice = f"The job has been started {starts} times."
    else:
        advice = "If another start may help, give max_restarts."
    message = (
        f"[worker {cause.rank}/{len(answers)}] Expected the function to return on every worker. "
        f"Received: {brief}, after {cause.seconds:.1f} s. {advice}"
    )
    return RayJobError("\n".join([message, *lines]), cause.rank, cause.exit_code)
