"""The tools of a case of this suite: strategies, values as NumPy, and comparisons."""

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.conformance.compare import FLOAT32, Checks, Tolerance, largest_difference
from tests.conformance.lab import fresh, plain_values
from tests.conformance.lazy import kd, keras
from tests.conformance.registry import KIND, Item

EXACT = Tolerance(0.0, 0.0, "exact")


class Lab(Checks):
    def __init__(self, item: Item):
        super().__init__(item.backend, item.replicas)

    def strategy(self, replicas: int | None = None, **options: Any) -> Any:
        """A `MirroredStrategy` of as many replicas as the case has, or of another number."""
        count = replicas or self.replicas
        if count == 1:
            return kd.OneDeviceStrategy(f"{KIND}:0")
        return kd.MirroredStrategy([f"{KIND}:{index}" for index in range(count)], **options)

    def components(self, value: Any, strategy: Any) -> list[Any]:
        return [self.numpy(one) for one in strategy.experimental_local_results(value)]

    def numpy(self, value: Any) -> Any:
        """Tensors and variables as NumPy arrays, containers and plain numbers kept."""
        return plain_values(value)

    def equal(self, expected: Any, actual: Any, tolerance: Tolerance = EXACT) -> None:
        """Compares as NumPy; plain numbers and lists of them are expected by value alone."""
        self.tolerances.add(tolerance.reason)
        actual = self.numpy(actual)
        expected = _like(self.numpy(expected), actual)
        found = largest_difference(expected, actual, tolerance)
        self.difference = max(self.difference, found)

    def device(self, tensor: Any) -> str:
        """The name of the device that holds a tensor."""
        if self.backend == "tensorflow":
            return tensor.device.rpartition("device:")[2].lower()
        if self.backend == "jax":
            device = min(tensor.devices(), key=lambda one: one.id)
            return f"{device.platform}:{device.id}"
        return f"{tensor.device.type}:{tensor.device.index or 0}"

    def still_usable(self, strategy: Any) -> None:
        """Checks that the strategy still runs, reduces and communicates."""

        def step(x):
            here = kd.get_replica_context()
            return here.all_reduce("SUM", keras.ops.cast(x, "float32"))

        count = strategy.num_replicas_in_sync
        self.check(kd.get_replica_context() is not None, "a scope was left open")
        value = numbered(strategy, lambda i: np.float32(i + 1))
        result = strategy.run(step, args=(value,))
        self.equal([count * (count + 1) / 2] * count, self.components(result, strategy))


def _like(expected: Any, actual: Any) -> Any:
    """Converts an expected number, or list of numbers, to the type of an actual array."""
    if isinstance(actual, np.ndarray) and isinstance(expected, bool | int | float | list):
        found = np.asarray(expected)
        # A value that the type can't hold must not be rounded to one that is equal.
        return (
            found.astype(actual.dtype)
            if np.can_cast(found.dtype, actual.dtype, "same_kind") or actual.dtype.kind not in "iub"
            else found
        )
    if isinstance(actual, list) and isinstance(expected, list) and len(actual) == len(expected):
        return [_like(*pair) for pair in zip(expected, actual, strict=True)]
    if isinstance(actual, dict) and isinstance(expected, dict) and actual.keys() == expected.keys():
        return {key: _like(expected[key], actual[key]) for key in expected}
    return expected


def labs(*, mirrored: bool) -> Callable[[Item], Lab]:
    if not mirrored:
        raise ValueError("Expected replicas: the facade of plain Keras is nothing. Drop --plain.")

    def lab(item: Item) -> Lab:
        fresh()
        return Lab(item)

    return lab


def numbered(strategy: Any, function: Callable[[Any], Any] = np.float32) -> Any:
    """A value that holds for each replica what a function gives for its number."""
    return strategy.distribute_values_from_function(
        lambda context: function(context.replica_id_in_sync_group)
    )


def variable_of(strategy: Any, value: Any, **options: Any) -> Any:
    with strategy.scope():
        return keras.Variable(value, **options)


__all__ = ["EXACT", "FLOAT32", "Lab", "fresh", "labs", "numbered", "variable_of"]
