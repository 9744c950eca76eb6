"""Reductions over replicas, and options for their communication."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

from kerasdist.core.enumerations import member_of, options_of


class ReduceOp(enum.Enum):
    """How replicas' values are reduced to one.

    Example::

        ones = strategy.run(lambda: keras.ops.ones(()))
        strategy.reduce(kd.ReduceOp.SUM, ones, axis=None)  # or "SUM"

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/ReduceOp
    """

    SUM = "SUM"
    MEAN = "MEAN"

    @classmethod
    def of(cls, op: ReduceOp | str) -> ReduceOp:
        """Returns the operation for a `ReduceOp`, TensorFlow's own, or a name in any case."""
        name = getattr(op, "value", op)
        try:
            return cls(str(name).upper())
        except ValueError:
            raise ValueError(
                f"Expected reduce_op to be one of {[one.value for one in cls]}. "
                f"Received: reduce_op={op!r}."
            ) from None


class CommunicationImplementation(enum.Enum):
    """Which collectives to use where a framework has several.

    Example::

        implementation = kd.CommunicationImplementation.RING
        options = kd.CommunicationOptions(implementation=implementation)

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/experimental/CommunicationImplementation
    """

    AUTO = "AUTO"
    RING = "RING"
    NCCL = "NCCL"


@dataclass(frozen=True)
class CommunicationOptions:
    """How a collective communicates.

    On TensorFlow workers sum gradients as the strategy's options say; in `fit` the job's time-out
    (``KERASDIST_MEETING_TIMEOUT``) stands in for `timeout_seconds`. On PyTorch `bytes_per_pack` and
    `compression` count. On JAX XLA decides, and ignores the options.

    Example::

        options = kd.CommunicationOptions(bytes_per_pack=50 * 2**20)
        strategy = kd.MultiWorkerMirroredStrategy(communication_options=options)

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/experimental/CommunicationOptions

    Attributes:
        bytes_per_pack: How many bytes are reduced together at most; 0: the framework's choice.
        timeout_seconds: How long to wait for the other replicas; None: the strategy's time-out.
        implementation: Which collectives to use.
        compression: ``"bf16"`` or ``"fp16"``: gradients of workers on PyTorch travel in half as
            many bytes, rounded; None: as they are.
    """

    bytes_per_pack: int = 0
    timeout_seconds: float | None = None
    implementation: CommunicationImplementation | str = CommunicationImplementation.AUTO
    compression: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.bytes_per_pack, int) or self.bytes_per_pack < 0:
            raise ValueError(
                "Expected bytes_per_pack to be 0 or more. "
                f"Received: bytes_per_pack={self.bytes_per_pack!r}."
            )
        seconds = self.timeout_seconds
        if seconds is not None and not (isinstance(seconds, int | float) and seconds > 0):
            raise ValueError(
                "Expected timeout_seconds to be positive, or None for the strategy's time-out. "
                f"Received: timeout_seconds={seconds!r}."
            )
        if self.compression not in (None, "bf16", "fp16"):
            raise ValueError(
                "Expected compression to be 'bf16', 'fp16' or None. "
                f"Received: compression={self.compression!r}."
            )
        chosen = member_of(CommunicationImplementation, self.implementation, "implementation")
        object.__setattr__(self, "implementation", chosen)

    @classmethod
    def of(cls, options: Any) -> CommunicationOptions:
        """Returns the given options, the defaults for None."""
        return options_of(cls, options, "communication_options")
