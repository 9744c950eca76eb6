"""What a case works with: the backend, the replicas, and the comparison with one device."""

import contextlib
import logging
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from tests.conformance.compare import FLOAT32, Checks, Tolerance, largest_difference
from tests.conformance.lazy import kd, keras
from tests.conformance.registry import Case, Item

SEED = 1337
# The message of the first-batch check for code that mixes the examples of a batch.
MIXES = "does not compute under"
Action = Callable[[Any], Any]


@contextlib.contextmanager
def losses_kept() -> Iterator[None]:
    """Keeps every loss that a layer adds, so that no later one gets its id.

    Plain Keras on JAX (3.15.1) remembers losses by id, those of an earlier trace too: one run
    in twenty counts a loss twice, and is then no reference. In a scope kerasdist forgets those ids.
    """
    kept = []
    add_loss = keras.layers.Layer.add_loss

    def keeping(layer, loss):
        kept.append(loss)
        add_loss(layer, loss)

    with mock.patch.object(keras.layers.Layer, "add_loss", keeping):
        yield


@contextlib.contextmanager
def logged(level: int = logging.DEBUG, name: str = "kerasdist") -> Iterator[list[str]]:
    """The lines of a logger, of a level and above, as they come."""
    lines: list[str] = []
    handler, logger = logging.Handler(), logging.getLogger(name)
    handler.emit = lambda record: lines.append(record.getMessage())
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


@dataclass(frozen=True)
class Outcome:
    """All that a model has to show after some actions, as NumPy."""

    results: list[Any]
    weights: list[np.ndarray]
    optimizer: list[np.ndarray]

    def parts(self, optimizer: bool) -> dict[str, Any]:
        shown: dict[str, Any] = {"results": self.results, "weights": self.weights}
        return {**shown, "optimizer": self.optimizer} if optimizer else shown


class PlainOutcomes:
    """One-device outcomes by case and call: they don't depend on the number of replicas."""

    def __init__(self):
        self._kept: dict[tuple[str, int], Outcome] = {}

    def get(self, key: tuple[str, int], compute: Callable[[], Outcome]) -> Outcome:
        if key not in self._kept:
            self._kept[key] = compute()
        return self._kept[key]


class PlainStrategy:
    """Replaces the strategy when the harness itself is tested: plain Keras against plain Keras."""

    def __init__(self, replicas: int):
        self.num_replicas_in_sync = replicas

    def scope(self):
        return contextlib.nullcontext(self)


class Lab(Checks):
    # Whether a model is also trained, saved and read in the scope, and not only made there.
    acts_in_scope = False

    def __init__(self, case: Case, backend: str, replicas: int, plain: PlainOutcomes, mirrored):
        super().__init__(backend, replicas)
        self.case = case
        self._plain = plain
        self._mirrored = mirrored
        self._calls = 0

    @property
    def keras_version(self) -> tuple[int, int]:
        """For features that plain Keras lacks in the oldest supported version."""
        major, minor = keras.__version__.split(".")[:2]
        return int(major), int(minor)

    def everyone(self, value: Any) -> list[Any]:
        return [value]

    @contextlib.contextmanager
    def folder(self) -> Iterator[Path]:
        """A folder, gone afterwards; where there are several workers, all see the same one."""
        with tempfile.TemporaryDirectory() as folder:
            yield Path(folder)

    def strategy(self, **options):
        if not self._mirrored:
            return PlainStrategy(self.replicas)
        return kd.MirroredStrategy(self.devices, **options)

    def made(self, build: Callable[[], Any], **options) -> Any:
        with self.strategy(**options).scope():
            return build()

    def with_replicas(self, replicas: int) -> "Lab":
        return type(self)(self.case, self.backend, replicas, self._plain, self._mirrored)

    def same(
        self,
        build: Callable[[], Any],
        *actions: Action,
        tolerance: Tolerance = FLOAT32,
        strategy: Any = None,
        share_plain: bool = True,
        length_unknown: bool = False,
        plain_key: str | None = None,
    ):
        """``build`` and ``actions`` under a strategy give what they give on one device.

        ``plain_key`` names a plain outcome that several cases share; ``share_plain=False`` where
        the data depends on the number of replicas; ``length_unknown=True`` where the source does
        not tell how many batches it has: plain Keras on TensorFlow counts one step too many in
        ``optimizer.iterations`` then, since the graph of the step that finds the end has counted
        before it finds it (3.15.1; a generator of 3 batches leaves 4). Returns the model that was
        trained under the strategy.
        """
        self._calls += 1
        if share_plain:
            key = (plain_key, 0) if plain_key else (self.case.name, self._calls)
            expected = self._plain.get(key, lambda: self.plain_outcome(build, actions))
        else:
            expected = self.plain_outcome(build, actions)
        strategy = strategy or self.strategy()
        with self._nothing_found():
            model, actual = self.run(build, actions, strategy)
        if length_unknown and self.backend == "tensorflow":
            expected = replace(expected, optimizer=expected.optimizer[1:])
            actual = replace(actual, optimizer=actual.optimizer[1:])
        self.equal(expected.parts(True), actual.parts(True), tolerance)
        return model

    @contextlib.contextmanager
    def _nothing_found(self) -> Iterator[None]:
        """The first-batch check finds nothing in what equals one device, and does not fail."""
        with self.told(MIXES) as found, logged() as lines:
            yield
        found += [line for line in lines if ": not checked: " in line]
        self.check(not found, "\n".join(found))

    def plain_outcome(self, build: Callable[[], Any], actions: Sequence[Action]) -> Outcome:
        """What plain Keras gives, on one device."""
        with losses_kept() if self.backend == "jax" else contextlib.nullcontext():
            return self.run(build, actions)[1]

    def run(
        self, build: Callable[[], Any], actions: Sequence[Action], strategy: Any = None
    ) -> tuple[Any, Outcome]:
        """Builds in the scope, acts outside of it: the model must remember its strategy."""
        fresh()
        with contextlib.ExitStack() as scope:
            if strategy:
                scope.enter_context(strategy.scope())
            model = build()
            if not self.acts_in_scope:
                scope.close()
            results = []
            for index, action in enumerate(actions):
                keras.utils.set_random_seed(SEED + 1 + index)
                results.append(plain_values(action(model)))
            return model, Outcome(results, values(model.weights), optimizer_values(model))

    def equal(self, expected: Any, actual: Any, tolerance: Tolerance = FLOAT32):
        self.tolerances.add(tolerance.reason)
        found = largest_difference(plain_values(expected), plain_values(actual), tolerance)
        self.difference = max(self.difference, found)

    def still_usable(self, strategy):
        """After whatever happened, the strategy trains, and trains rightly."""
        from tests.conformance.models import dense, regression

        x, y = regression(5)
        train = lambda model: model.fit(x, y, batch_size=5, verbose=0)  # noqa: E731
        self.same(dense, train, strategy=strategy, plain_key="still usable")


def labs(*, mirrored: bool) -> Callable[[Item], Lab]:
    """What makes the lab of an item; ``mirrored=False`` tests the harness, plain against plain."""
    plain = PlainOutcomes()
    return lambda item: Lab(item.case, item.backend, item.replicas, plain, mirrored)


def fresh():
    """Layer names and draws begin anew, so that twins are born equal."""
    keras.backend.clear_session(free_memory=False)
    keras.utils.set_random_seed(SEED)


def values(variables) -> list[np.ndarray]:
    return [np.array(keras.ops.convert_to_numpy(variable)) for variable in variables]


def optimizer_values(model) -> list[np.ndarray]:
    """The optimizer's state; a learning-rate schedule's rate is a variable of it too."""
    optimizer = getattr(model, "optimizer", None)
    return [] if optimizer is None else values(optimizer.variables)


def plain_values(result: Any) -> Any:
    """Tensors as NumPy, History as its dicts, containers kept."""
    if type(result).__name__ == "History":
        return {"history": result.history, "epoch": list(result.epoch)}
    if isinstance(result, dict):
        return {key: plain_values(value) for key, value in result.items()}
    if isinstance(result, (list, tuple)):
        return [plain_values(value) for value in result]
    if isinstance(result, (str, bytes, bool, int, float, type(None), np.ndarray, np.generic)):
        return result
    return np.asarray(keras.ops.convert_to_numpy(result))
