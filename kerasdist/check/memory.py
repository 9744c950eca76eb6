"""Finds how many examples a replica has memory for at once.

If the user has called `kerasdist.config.set_most_examples_at_once("auto")`, a worker takes trial
steps before the first training step. A trial step computes the gradients of a replica's rows, but
updates no variable. It needs no other worker, so if it fails on one worker, no other worker waits
in a collective. After each trial step the workers tell each other whether the memory was enough.
"""

from __future__ import annotations

import gc
import logging
import traceback
from collections.abc import Callable

from kerasdist import keras_compat
from kerasdist.backends.base import random_states
from kerasdist.backends.base.model_trainer import TrainerLike
from kerasdist.backends.base.trial import MemoryTrial, TriedBatch
from kerasdist.backends.base.user_places import state_kept
from kerasdist.check.comparison import seeds_kept
from kerasdist.core.context import current
from kerasdist.errors import ReplicaError, UnsupportedError
from kerasdist.job.job import all_do, everyone

_log = logging.getLogger("kerasdist")
_KINDS = {"MemoryError", "OutOfMemoryError", "ResourceExhaustedError"}
_TEXTS = "RESOURCE_EXHAUSTED", "can't allocate memory"  # in errors of JAX, and of PyTorch on CPUs


def is_lack(error: BaseException) -> bool:
    """Returns whether an error says that a device, or the host, has too little memory."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    return bool(_KINDS & kinds) or any(text in str(error) for text in _TEXTS)


def find(trainer: TrainerLike, examples: int, rows: int, attempt: Callable[[], object]) -> None:
    """Finds for how many rows a replica has memory when it calls the model once.

    The number is halved until every worker has enough memory. All workers must call this function.

    Args:
        trainer: The trainer, on which this function sets `most_rows`.
        examples: How many examples the global batch has.
        rows: How many rows the largest replica of this worker has.
        attempt: A function that takes a trial step, and calls the model for at most
            ``trainer.most_rows`` rows at once.
    """
    replicas, model = trainer.replicas, trainer.model
    is_known = trainer.most_rows is not None or examples <= trainer.most_examples
    if is_known or current.replica is not None or examples < replicas.num_replicas:
        return
    job, most, lack = replicas.job, None, None
    trainer.keep_rows(None, examples)
    try:
        trainer.require_passes()
    except UnsupportedError as error:
        _log.debug("%s: all examples at once: %s", model.name, error)
        return
    try:
        rows = max(everyone(job, "rows of a replica", rows))
        while True:
            with all_do(job, 'the trial step of set_most_examples_at_once("auto")', ReplicaError):
                own = _error_of(attempt)
                is_lacking = own is not None and is_lack(own)
                # If a trial step with all rows at once fails for another reason than lack of
                # memory, no error is raised here: the training step itself will raise the error.
                raises = (most or rows) == 1 if is_lacking else most is not None
                if own is not None and raises:
                    raise own from lack
            if not any(everyone(job, "memory for a step", is_lacking)):
                break
            lack, most = own or lack, -(-(most or rows) // 2)
            trainer.keep_rows(most, examples)
    except BaseException:
        trainer.keep_rows(None, 0)
        raise
    if most is not None and (job is None or job.is_chief):
        _log.info(
            "%s: %d examples at a time, of %d on a replica: there is no memory for more.",
            model.name,
            most,
            rows,
        )


def _error_of(attempt: Callable[[], object]) -> Exception | None:
    """Calls `attempt` and returns the error that it raises, or None.

    If the error says that memory is lacking, a note with advice is added to it.
    """
    try:
        attempt()
    except Exception as error:  # noqa: BLE001 (raised when all workers know of it)
        one: BaseException | None = error
        while one is not None:  # the errors' frames hold the arrays that fill the memory
            traceback.clear_frames(one.__traceback__)
            one = one.__cause__ or one.__context__
        if is_lack(error):
            error.add_note(_ADVICE)
        return error
    finally:
        gc.collect()
    return None


_ADVICE = (
    'This was the trial step of set_most_examples_at_once("auto"). If one example at a time does '
    "not fit, the memory is full of weights, gradients and the optimizer's variables: divide them "
    "(sharding=), or take a smaller type."
)


def try_step(trainer: TrainerLike, trial_class: type[MemoryTrial], rows: object) -> None:
    """Takes a trial step with the rows of a replica, and undoes all that it changes."""
    states, model, trial = random_states.kept(), trainer.model, trial_class(trainer)
    try:
        with (
            seeds_kept(model),
            keras_compat.in_trial(trial),
            trial.own_state_kept(),
            state_kept(model),
        ):
            trial.take(TriedBatch(rows, rows, []))
    finally:
        random_states.put_back({**states, "keras": None})
