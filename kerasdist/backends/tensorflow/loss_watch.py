"""Tells of a loss that is not finite on one replica alone, which the numbers of the batch hide."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, final

import keras
import tensorflow as tf

from kerasdist.backends.tensorflow.variables import native
from kerasdist.errors import DisagreementError
from kerasdist.job.batches import ADVICE
from kerasdist.job.comparison import described_difference
from kerasdist.user_warnings import warn_user

if TYPE_CHECKING:
    from kerasdist.job.job import Job


@final
class LossWatch:
    """Counts the training steps that left each replica's sum of losses finite.

    One step later the gradients have carried what is not finite everywhere; the counts still tell
    where it came from. They are read when an epoch's loss is not finite, so no step waits for it.
    """

    def __init__(self, engine: tf.distribute.Strategy, model: str, *, counts: bool) -> None:
        """Makes the counters, at zero.

        Args:
            engine: The strategy that runs the replicas.
            model: The model's name, for the warning.
            counts: Whether to count examples, too, for workers to compare.
        """
        self._model = model
        self._warned = False
        with engine.scope():
            self._finite_steps = _a_number_for_each(engine.num_replicas_in_sync)
            # What the sizes of the global batches add up to.
            self._examples = _a_number_for_each(engine.num_replicas_in_sync) if counts else None

    @property
    def variables(self) -> list[Any]:
        """The counters."""
        return [self._finite_steps, *([] if self._examples is None else [self._examples])]

    @property
    def examples(self) -> list[int]:
        """The number of examples of all global batches, as each replica counts them."""
        return [] if self._examples is None else self._examples.numpy().tolist()

    def forget_examples(self) -> None:
        """Counts examples from 0 again."""
        if self._examples is not None:
            self._examples.assign(keras.ops.zeros_like(self._examples))

    def require_equal_sizes(
        self, variables: Sequence[Any], values: Sequence[tf.Tensor], job: Job, replicas_each: int
    ) -> None:
        """Makes sure that all workers have had batches of the same sizes, from what a step summed.

        Args:
            variables: Variables of which it is known what all workers hold together.
            values: That, outside of a graph.
            job: The job of this process.
            replicas_each: How many replicas a worker has.

        Raises:
            DisagreementError: If they have not; on all workers alike.
        """
        counts = next(
            (
                value.numpy().tolist()
                for variable, value in zip(variables, values, strict=True)
                if variable is self._examples
            ),
            [0],
        )
        if min(counts) == max(counts):
            return
        theirs = [{"examples of all batches so far": one} for one in counts[::replicas_each]]
        raise DisagreementError(
            f"[worker {job.rank}/{job.num_workers}] Expected all workers to train on the same "
            f"batches. Received: {described_difference(theirs)}. {ADVICE}."
        )

    def count(self, loss_tracker: Any, examples: Any) -> None:
        """Notes in a replica, after its step, whether its own losses are finite.

        Args:
            loss_tracker: The model's mean of losses.
            examples: The number of examples of the global batch, None if it is not divided.
        """
        finite = tf.math.is_finite(tf.convert_to_tensor(loss_tracker.total))
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        count = tf.one_hot(replica, self._finite_steps.shape[0], dtype=tf.int64)
        native(self._finite_steps).assign_add(count * tf.cast(finite, tf.int64))
        if self._examples is not None and examples is not None:
            own = tf.one_hot(replica, self._examples.shape[0], dtype=tf.int64)
            native(self._examples).assign_add(own * tf.cast(examples, tf.int64))

    def warn(self, loss: Any) -> None:
        """Warns, once, if some replicas lost their loss before the others.

        Args:
            loss: The mean over all replicas, after an epoch.
        """
        if self._warned or tf.math.is_finite(loss):
            return
        counts = self._finite_steps.numpy().tolist()
        if min(counts) == max(counts):
            return
        self._warned = True
        replicas = [replica for replica, count in enumerate(counts) if count == min(counts)]
        warn_user(
            f"The training loss of the model {self._model!r} stopped being finite, first on "
            f"replica {', '.join(map(str, replicas))} of {len(counts)} alone. As on one device, it "
            "is not finite for the whole batch then. Look for examples with NaN or infinite "
            "values."
        )


def _a_number_for_each(replicas: int) -> Any:
    """A number for each replica, of which each writes its own."""
    return keras.Variable(
        keras.ops.zeros(replicas, "int64"),
        trainable=False,
        aggregation="sum",
        synchronization="on_read",
    )
