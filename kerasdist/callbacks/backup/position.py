"""The position of a run in its data, and how another process returns to it.

Before an epoch (or before the first one, where `fit` has ``steps_per_epoch`` and the data go on
from epoch to epoch), the states of all random generators are kept, with the attributes of the
source that have changed. A source that is read again from there yields the same batches, and those
that were trained on are skipped. The iterator of a ``tf.data`` pipeline has a position of its own,
so such a pipeline is not read from its beginning.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np

from kerasdist import keras_compat
from kerasdist.backends.base import random_states
from kerasdist.callbacks.backup.encoding import Remembering, renumbered
from kerasdist.input.adapter import WrappedAdapter
from kerasdist.input.autoshard import OwnSource
from kerasdist.input.loaders import samplers_of
from kerasdist.input.worker_batches import ShardedAdapter


@final
@dataclass(frozen=True)
class _Resume:
    """How the next iteration begins.

    Attributes:
        passed: How many batches it skips.
        random: The states of the random generators that it begins with.
        returns: Whether the present states are restored afterwards.
        is_late: Whether the states are set after the iterator was made: Keras had made it before
            the epoch began.
    """

    passed: int
    random: Mapping[str, Any]
    returns: bool
    is_late: bool


@final
@dataclass(frozen=True)
class _Begin:
    """The state before an iteration over the data.

    Attributes:
        random: The states of the random generators; None for those that the backup has anyway.
        source: The changed attributes of the source, as forms.
        arrays: The arrays that the forms name, from number 0.
        epochs: How many epochs Keras's adapter has read, None where no order depends on it.
    """

    random: Mapping[str, Any] | None
    source: Sequence[Any]
    arrays: Sequence[np.ndarray[Any, Any]]
    epochs: int | None


@final
class Position:
    """The position of a run in the data of its `fit`.

    Attributes:
        facts: What must be equal in a run that goes on from it.
    """

    def __init__(self, source: Any = None, steps_per_epoch: int | None = None) -> None:
        self.facts: dict[str, Any] = {}
        self._source = Remembering(_objects_of(source))
        self._steps = steps_per_epoch
        self._goes_on = steps_per_epoch is not None
        self._iterations: keras_compat.FollowedIterations | None = None
        self._lost = _lost_of(source)
        self._begin: _Begin | None = None
        self._place: bytes | None = None
        self._is_due = self._is_read = self._reads_aside = False
        self._passed_before, self._passed = 0, 0
        self._resume: _Resume | None = None
        self._epochs = 0
        self._adapter: Any = None
        self._batches: int | None = None
        self._is_made = self._is_late = False
        self._is_heard_later = isinstance(source, keras_compat.PyDataset)
        self._pass_epochs: Callable[[int], None] | None = None

    def follow(self, adapter: Any, *, reads_ahead: bool) -> None:
        """Takes the adapter that Keras made, and follows its ``tf.data`` iterators."""
        self._adapter = adapter
        if keras_compat.shuffles_without_seed(adapter):
            self._lost.append(
                "the order of the arrays, which TensorFlow shuffles without a seed (call "
                "keras.utils.set_random_seed)"
            )
        if isinstance(adapter, ShardedAdapter):
            self._follow_own(adapter.batches.source)
        else:  # whose batches do not depend on the number of workers
            self.facts["batch_size"] = adapter.batch_size
            self.facts["number of batches"] = adapter.num_batches
        self._reads_aside = keras_compat.reads_aside(adapter)
        self._batches = adapter.num_batches if self._goes_on else None
        if self._batches is not None and self._batches != self._steps:
            self._lost.append(
                f"the place in {self._batches} batches of which an epoch takes "
                f"steps_per_epoch={self._steps} (let them be as many, or repeat the data)"
            )
        dataset = keras_compat.dataset_of(adapter)
        if dataset is None:
            return
        facts = keras_compat.facts_of(dataset)
        self._lost += [f"in the tf.data pipeline: {one}" for one in facts.unrepeatable]
        if self._batches is not None:
            self._lost.append(
                f"the place in a tf.data pipeline with an end, with steps_per_epoch={self._steps} "
                "(repeat it, or leave steps_per_epoch out)"
            )
        if facts.calls_python or (self._goes_on and (facts.draws or reads_ahead)):
            return  # it is read again, from its beginning
        self._iterations = keras_compat.FollowedIterations(self._record_place)
        if not keras_compat.is_native_dataset(dataset):
            followed = keras_compat.FollowedDataset(dataset, self._iterations)
            keras_compat.replace_dataset(adapter, followed)

    def _follow_own(self, source: OwnSource) -> None:
        """Follows data that only this worker reads; the chief cannot save their position."""
        self._pass_epochs = source.pass_epochs
        if source.pass_epochs is None:
            self._lost.append("the place in pipelines that a function makes for each worker")
        elif isinstance(source.dataset, keras_compat.PyDataset):
            self._lost.append("what a PyDataset remembers of which each worker reads a part")

    def lost(self) -> list[str]:
        """Returns what a backup cannot bring back, a line each."""
        return [*self._lost, *self._source.lost()]

    def begun(self, make: Callable[[], Any]) -> Any:
        """Returns an iterator over the data, at the position where the run continues."""
        resume, self._resume = self._resume, None
        if resume is None:
            if self._is_over():
                # On some backends Keras restarts the data before it calls `on_epoch_end`.
                self._begin = self._now(random_states.kept())
                self._passed_before = -self._passed
                self._is_made = True
            return make()
        now = random_states.kept()
        if not resume.is_late:
            random_states.put_back(resume.random)
        iterator = make()
        if resume.is_late:
            random_states.put_back(resume.random)
        for _ in range(resume.passed):
            next(iterator, None)
        if resume.returns:
            self.restore_random_states(now, resume.random)
        return iterator

    def restore_random_states(
        self, states: Mapping[str, Any], begin: Mapping[str, Any] | None = None
    ) -> None:
        """Sets the random generators to the states of a backup, once batches are read.

        TensorFlow reads Python sources ahead, in another thread. If that thread draws from the
        global generators, they have the right states already.
        """
        if self._reads_aside:
            before = begin or (self._begin.random if self._begin is not None else None)
            if before is not None and random_states.kept() != before:
                return
        random_states.put_back(states)

    def begun_pipeline(self, make: Callable[[], Any]) -> Any:
        """Does the same as `begun`, for a framework's own pipeline."""
        following = self._iterations
        return self.begun(make if following is None else lambda: following.begun(make))

    def epoch_begins(self) -> None:
        """Keeps the state from which the epoch can be read again."""
        if self._is_over():
            self._begin, self._passed_before = None, -self._passed
            self._is_late = False
        self._passed_before, self._passed = self._passed_before + self._passed, 0
        if self._begin is None or not self._goes_on:
            self._begin = self._now(random_states.kept())
        elif self._is_made:
            self._begin = self._since(self._begin, random_states.kept())
            self._is_made, self._is_late = False, True
        self._epochs += 1
        self._is_due = True

    def _is_over(self) -> bool:
        """Returns whether data that go on over epochs have ended, so that Keras restarts them."""
        passed = self._passed_before + self._passed
        return self._goes_on and self._batches is not None and passed >= self._batches > 0

    def batch_begins(self) -> None:
        """Keeps the position in a pipeline before the first batch of an epoch is read."""
        if self._is_due and self._goes_on and self._is_read and self._iterations is not None:
            self._record_place(self._iterations.place())

    def _record_place(self, place: bytes | None) -> None:
        """Keeps the position of this epoch's iterator; Keras makes others to inspect a batch."""
        if self._is_due:
            self._place, self._is_due, self._is_read = place, False, True

    def batches_passed(self, count: int) -> None:
        """Keeps how many batches of the epoch were trained on."""
        self._passed = count

    def kept(self, batches: int, arrays: list[np.ndarray[Any, Any]]) -> dict[str, Any]:
        """Returns the position in the form that a backup keeps."""
        begin, place = self._begin, self._place
        assert begin is not None  # since `epoch_begins`
        goes_on = self._goes_on and not (self._is_over() and not batches)
        passed = self._passed_before + (0 if batches else self._passed)
        if not batches and not goes_on:
            begin, passed = self._now(None), 0
        elif not batches and self._is_made:
            begin = self._since(begin, begin.random)
        if not batches and self._iterations is not None:
            following = self._iterations
            place = following.place() if goes_on else following.next_place()
        form: dict[str, Any] = {
            "random": begin.random,
            "source": renumbered(begin.source, len(arrays)),
            "number of arrays": len(begin.arrays),
            "passed": passed,
            "late": self._is_late and bool(batches),
            "epochs": self._epochs - (1 if batches else 0),
            "epochs read": begin.epochs,
            "place": None,
        }
        arrays += begin.arrays
        if place is not None:
            form["place"] = len(arrays)
            arrays.append(np.frombuffer(place, np.uint8))
        return form

    def go_to(
        self, form: Mapping[str, Any], arrays: Sequence[np.ndarray[Any, Any]], *, within: bool
    ) -> None:
        """Continues from a position that a backup kept."""
        self._source.put_back(form["source"], arrays)
        self._passed_before, self._passed = int(form["passed"]), 0
        self._epochs = int(form["epochs"])
        keras_compat.set_epochs_read(self._adapter, form.get("epochs read"))
        if self._pass_epochs is not None and not self._goes_on:
            self._pass_epochs(self._epochs)
        place, passed = form["place"], form["passed"] if self._goes_on else 0
        if place is not None and self._iterations is not None:
            self._iterations.go_to(arrays[place].tobytes())
            passed = 0
        random = form["random"]
        if random is None:
            return
        if self._goes_on:
            is_late = form["late"]
            self._begin = self._now(random)
            self._resume = _Resume(passed, random, returns=not within, is_late=is_late)
            self._is_late = is_late
        else:
            random_states.put_back(random)

    def _since(self, begin: _Begin, random: Mapping[str, Any] | None) -> _Begin:
        """Returns the state with which Keras began, at the end of an epoch, the next iteration."""
        return self._now(random) if self._is_heard_later else replace(begin, random=random)

    def _now(self, random: Mapping[str, Any] | None) -> _Begin:
        forms, arrays = self._source.state(0)
        epochs = keras_compat.epochs_read(self._adapter)
        return _Begin(random, forms, [array.copy() for array in arrays], epochs)


@final
class PositionedAdapter(WrappedAdapter):
    """Passes the data to Keras's loop from the position where the run continues."""

    def __init__(self, inner: Any, position: Position) -> None:
        super().__init__(inner)
        self._position = position

    def get_numpy_iterator(self) -> Iterator[Any]:
        """Returns the inner adapter's batches."""
        yield from self._position.begun(lambda: iter(self._inner.get_numpy_iterator()))

    def get_jax_iterator(self) -> Iterator[Any]:
        """Returns the inner adapter's batches."""
        yield from self._position.begun(lambda: iter(self._inner.get_jax_iterator()))

    def get_tf_dataset(self) -> Any:
        """Returns the inner adapter's batches."""
        return self._inner.get_tf_dataset(self._position.begun_pipeline)

    def get_torch_dataloader(self) -> Iterator[Any]:
        """Returns the inner adapter's batches."""
        # Begun at once, since the iterator of a DataLoader draws a random number.
        begun = self._position.begun(lambda: iter(self._inner.get_torch_dataloader()))
        return self._read(begun)

    def _read(self, iterator: Iterator[Any]) -> Iterator[Any]:
        """Yields batches to Keras's loop on PyTorch, which reads one before `on_batch_begin`."""
        for _ in iter(int, 1):
            self._position.batch_begins()
            try:
                batch = next(iterator)
            except StopIteration:
                return
            yield batch

    @property
    def builtin_prefetch(self) -> bool:
        """The inner adapter's."""
        return self._inner.builtin_prefetch


def _objects_of(source: Any) -> list[Any]:
    """Returns the objects that may change while a source is read."""
    if isinstance(source, keras_compat.PyDataset):
        return [source]
    if keras_compat.is_torch_dataloader(source):
        generator = types.SimpleNamespace(generator=source.generator)
        return [source.dataset, *samplers_of(source), generator]
    return []


def _lost_of(source: Any) -> list[str]:
    if keras_compat.is_torch_dataloader(source) and source.persistent_workers:
        return ["what workers of a DataLoader draw (persistent_workers=False brings it back)"]
    return []
