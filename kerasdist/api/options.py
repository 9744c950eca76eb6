"""Options of reductions, communication and `run`, given as names, enum members or objects."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Protocol, TypeVar

from kerasdist.errors import UnsupportedError


class _Dataclass(Protocol):
    __dataclass_fields__: ClassVar[dict[str, Any]]


E = TypeVar("E", bound=enum.Enum)
Options = TypeVar("Options", bound=_Dataclass)


class ReduceOp(enum.Enum):
    """How the values of the replicas are reduced to a single value.

    Example::

        ones = strategy.run(lambda: keras.ops.ones(()))
        strategy.reduce(kd.ReduceOp.SUM, ones, axis=None)  # or "SUM"

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/ReduceOp
    """

    SUM = "SUM"
    MEAN = "MEAN"

    @classmethod
    def of(cls, op: ReduceOp | str) -> ReduceOp:
        """Returns the `ReduceOp` for a name in any letter case, or for TensorFlow's `ReduceOp`."""
        return member_of(cls, op, "reduce_op")

    from_variable_aggregation = of


class CommunicationImplementation(enum.Enum):
    """Which collectives to use, if a framework has several implementations.

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

    On TensorFlow, the options given to the strategy apply when workers sum gradients. In `fit`,
    however, the job's time-out (``KERASDIST_MEETING_TIMEOUT``) replaces `timeout_seconds`. On
    PyTorch, only `bytes_per_pack` and `compression` of the strategy's options have an effect. On
    JAX no option has an effect, because XLA decides how to communicate. An option without effect
    causes a warning. On a backend that does not support `compression`, this option causes an error.

    Example::

        options = kd.CommunicationOptions(bytes_per_pack=50 * 2**20)
        strategy = kd.MultiWorkerMirroredStrategy(communication_options=options)

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/experimental/CommunicationOptions

    Attributes:
        bytes_per_pack: The largest number of bytes in one reduction, which may combine several
            tensors; 0 lets the framework choose.
        timeout_seconds: How long to wait for the other replicas; None means the strategy's
            time-out.
        implementation: Which collectives to use.
        compression: ``"bf16"`` or ``"fp16"``: workers on PyTorch send gradients in this type, which
            takes half as many bytes as float32. None: gradients are sent in their own type.
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
        require_choice("compression", self.compression, (None, "bf16", "fp16"))
        convert_field(self, "implementation", CommunicationImplementation)


@dataclass(frozen=True)
class RunOptions:
    """Options that ``tf.distribute`` has for `run` on TPUs; in kerasdist they change no result.

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/RunOptions

    Example:
        >>> options = kd.RunOptions(experimental_bucketizing_dynamic_shape=True)
        >>> strategy.run(step, args=(batch,), options=options)

    Attributes:
        experimental_enable_dynamic_batch_size: Has no effect: batches may always differ in size.
        experimental_bucketizing_dynamic_shape: Has no effect: JAX compiles a function once for each
            shape.
        experimental_xla_options: Must be None.

    Raises:
        UnsupportedError: If `experimental_xla_options` is not None: no backend supports such
            options.
    """

    experimental_enable_dynamic_batch_size: bool = True
    experimental_bucketizing_dynamic_shape: bool = False
    experimental_xla_options: Any = None

    def __post_init__(self) -> None:
        if self.experimental_xla_options is not None:
            raise UnsupportedError(
                "Expected no options for XLA. Received: experimental_xla_options="
                f"{self.experimental_xla_options!r}. Set XLA's options for the whole process, by "
                "the environment variable XLA_FLAGS."
            )


def require_choice(argument: str, value: object, choices: Sequence[object]) -> None:
    """Raises ValueError for a value that is not one of an argument's choices."""
    if value not in choices:
        raise ValueError(
            f"Expected {argument} to be one of {list(choices)}. Received: {argument}={value!r}."
        )


def member_of(kind: type[E], value: object, argument: str) -> E:
    """Returns the member of the enum `kind` whose name is `value`; case does not matter.

    `value` may also be a member of another enum, such as an enum of TensorFlow. In this case the
    member of `kind` that has the same name is returned.
    """
    name: Any = value.name if isinstance(value, enum.Enum) else value
    if isinstance(name, str) and name.upper() in kind.__members__:
        return kind[name.upper()]
    raise ValueError(
        f"Expected {argument} to be one of {list(kind.__members__)}, by name or as a member of "
        f"kerasdist.{kind.__name__}. Received: {argument}={value!r}."
    )


def convert_field(options: object, name: str, kind: type[enum.Enum]) -> None:
    """Replaces an enum member's name by the member, in a field of a frozen dataclass of options."""
    object.__setattr__(options, name, member_of(kind, getattr(options, name), name))


def options_of(kind: type[Options], value: object, argument: str) -> Options:
    """Returns `value` as options of the class `kind`.

    None gives the default options. TensorFlow's options of the same meaning are converted.
    """
    if value is None:
        return kind()
    if isinstance(value, kind):
        return value
    given = {one.name: getattr(value, one.name) for one in fields(kind) if hasattr(value, one.name)}
    if given and type(value).__module__.startswith("tensorflow."):
        return kind(**given)
    raise TypeError(
        f"Expected {argument} to be kerasdist.{kind.__name__} or None. Received: "
        f"{argument}={value!r:.200} of type {type(value).__name__}. Make them with "
        f"kerasdist.{kind.__name__}(...)."
    )
