"""The options of `Strategy.run`, which no backend needs: they are taken and checked."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from kerasdist.errors import UnsupportedError


@dataclass(frozen=True)
class RunOptions:
    """How `Strategy.run` runs a function: options for TPUs, without effect on any result.

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/RunOptions

    Example:
        >>> options = kd.RunOptions(experimental_bucketizing_dynamic_shape=True)
        >>> strategy.run(step, args=(batch,), options=options)

    Attributes:
        experimental_enable_dynamic_batch_size: Whether batches may differ in size. They may in any
            case.
        experimental_bucketizing_dynamic_shape: Whether to compile less often where shapes differ.
            JAX compiles a function once for each shape in any case.
        experimental_xla_options: Must be None.

    Raises:
        TypeError: If a flag is not a bool.
        UnsupportedError: If there are options for XLA.
    """

    experimental_enable_dynamic_batch_size: bool = True
    experimental_bucketizing_dynamic_shape: bool = False
    experimental_xla_options: Any = None

    def __post_init__(self) -> None:
        for field in fields(self)[:2]:
            value = getattr(self, field.name)
            if not isinstance(value, bool):
                raise TypeError(
                    f"Expected a bool. Received: {field.name}={value!r}. Pass True or False."
                )
        if self.experimental_xla_options is not None:
            raise UnsupportedError(
                "Expected no options for XLA. Received: experimental_xla_options="
                f"{self.experimental_xla_options!r}. Set XLA's options for the whole process, by "
                "the environment variable XLA_FLAGS."
            )

    @classmethod
    def of(cls, options: Any) -> RunOptions:
        """Returns the options of None, a `RunOptions`, or a ``tf.distribute.RunOptions``."""
        if options is None:
            return cls()
        if isinstance(options, cls):
            return options
        # tf.distribute's is a named tuple with these fields, in this order.
        if isinstance(options, tuple) and type(options).__name__ == cls.__name__:
            return cls(*options)
        raise TypeError(
            f"Expected kerasdist.RunOptions or None. Received: options={options!r:.100} of type "
            f"{type(options).__name__}. Pass the arguments of the function as args=(...) and "
            "kwargs={...}."
        )
