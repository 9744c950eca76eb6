"""Where a run is in its data, and how another process comes back to that place.

Before an epoch, or before the first one where `fit` has ``steps_per_epoch`` and the data go on from
epoch to epoch, the states of all random generators are noted, and what has changed of the source's
own attributes. From there a source that is read again yields the same batches; those that have been
trained on are passed over. A ``tf.data`` pipeline need not be read from its beginning: its iterator
says where it is.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np

from kerasdist import keras_seam
from kerasdist.backends import registry
from kerasdist.callbacks import training_state
from kerasdist.callbacks.encoding import renumbered
from kerasdist.callbacks.remembering import Remembering
from kerasdist.input.adapter import WrappedAdapter
from kerasdist.input.autoshard import OwnSource
from kerasdist.input.sharded import ShardedAdapter


@final
@dataclass(frozen=True)
class _Resume:
    """How the next iteration begins.

    Attributes:
        passed: How many batches it passes over.
        random: The states of the random generators that it begins with.
        returns: Whether those of now are in force again afterwards.
        is_late: Whether they are put back when the iteration has been made: Keras had made it
            before the epoch began.
    """

    passed: int
    random: Mapping[str, Any]
    returns: bool
    is_late: bool


@final
@dataclass(frozen=True)
class _Begin:
    """What an iteration over the data begins with.

    Attributes:
        random: The states of the random generators; None for those that the backup has anyway.
        source: What has changed of the source, in forms.
        arrays: The arrays that the forms name, from number 0.
    """

    random: Mapping[str, Any] | None
    source: Sequence[Any]
    arrays: Sequence[np.ndarray[Any, Any]]


@final
class Position:
    """Where a run is in the data of its `fit`."""

    def __init__(self, source: Any = None, steps_per_epoch: int | None = None) -> None:
        """Begins at the data's beginning.

        Args:
            source: What the caller gave to `fit`, None where that is not known.
            steps_per_epoch: As `fit` got it. With it, an epoch goes on where the one before it has
                ended, until the data's end, after which Keras begins them again.
        """
        self._source = Remembering(_objects_of(source))
        self._steps = steps_per_epoch
        self._goes_on = steps_per_epoch is not None
        self._iterations: keras_seam.FollowedIterations | None = None
        self._lost = _lost_of(source)
        self._begin: _Begin | None = None
        self._place: bytes | None = None
        self._is_due = self._is_read = self._reads_aside = False
        self._passed_before, self._passed = 0, 0
        self._resume: _Resume | None = None
        self._epochs = 0
        self._batches: int | None = None
        self._is_made = self._is_late = False
        self._is_heard_later = isinstance(source, keras_seam.PyDataset)
        self._pass_epochs: Callable[[int], None] | None = None

    def follow(self, adapter: Any) -> None:
        """Notes the adapter that Keras made, and follows the iterations of a ``tf.data`` pipeline.

        Args:
            adapter: One of Keras's data adapters.
        """
        if keras_seam.shuffles_without_seed(adapter):
            self._lost.append(
                "the order of the arrays, which TensorFlow shuffles without a seed (call "
                "keras.utils.set_random_seed)"
            )
        if isinstance(adapter, ShardedAdapter):
            self._follow_own(adapter.batches.source)
        self._reads_aside = keras_seam.reads_aside(adapter)
        self._batches = adapter.num_batches if self._goes_on else None
        if self._batches is not None and self._batches != self._steps:
            self._lost.append(
                f"the place in {self._batches} batches of which an epoch takes "
                f"steps_per_epoch={self._steps} (let them be as many, or repeat the data)"
            )
        dataset = keras_seam.dataset_of(adapter)
        if dataset is None:
            return
        facts = keras_seam.facts_of(dataset)
        self._lost += [f"in the tf.data pipeline: {one}" for one in facts.unrepeatable]
        if self._batches is not None:
            self._lost.append(
                f"the place in a tf.data pipeline with an end, with steps_per_epoch={self._steps} "
                "(repeat it, or leave steps_per_epoch out)"
            )
        ahead = registry.current().reads_ahead
        if facts.calls_python or (self._goes_on and (facts.draws or ahead)):
            return  # it is read again, from its beginning
        self._iterations = keras_seam.FollowedIterations(self._note_place)
        if not keras_seam.is_native_dataset(dataset):
            followed = keras_seam.FollowedDataset(dataset, self._iterations)
            keras_seam.replace_dataset(adapter, followed)

    def _follow_own(self, source: OwnSource) -> None:
        """Notes what this worker alone reads; what it remembers, the chief cannot write down."""
        self._pass_epochs = source.pass_epochs
        if source.pass_epochs is None:
            self._lost.append("the place in pipelines that a function makes for each worker")
        elif isinstance(source.dataset, keras_seam.PyDataset):
            self._lost.append("what a PyDataset remembers of which each worker reads a part")

    def lost(self) -> list[str]:
        """Returns what a backup cannot bring back, a line each."""
        return [*self._lost, *self._source.lost()]

    def begun(self, make: Callable[[], Any]) -> Any:
        """Returns an iteration over the data, which begins where it is to go on.

        Args:
            make: Begins one.
        """
        resume, self._resume = self._resume, None
        if resume is None:
            if self._is_over():
                # On some backends Keras does so at once, before callbacks hear of the epoch's end.
                self._begin = self._now(training_state.random_states())
                self._passed_before = -self._passed
                self._is_made = True
            return make()
        now = training_state.random_states()
        if not resume.is_late:
            training_state.set_random_states(resume.random)
        iterator = make()
        if resume.is_late:
            training_state.set_random_states(resume.random)
        for _ in range(resume.passed):
            next(iterator, None)
        if resume.returns:
            self.settle(now, resume.random)
        return iterator

    def settle(self, states: Mapping[str, Any], begin: Mapping[str, Any] | None = None) -> None:
        """Lets the random generators go on from the states of a backup, once batches are read.

        TensorFlow reads what is Python's ahead, in another thread. If that draws from the global
        generators, they are where they must be.

        Args:
            states: The states.
            begin: Those before the batches were read; None: those of the epoch's begin.
        """
        if self._reads_aside:
            before = begin or (self._begin.random if self._begin is not None else None)
            if before is not None and training_state.random_states() != before:
                return
        training_state.set_random_states(states)

    def begun_pipeline(self, make: Callable[[], Any]) -> Any:
        """Returns an iteration over a pipeline of the framework's own, likewise.

        Args:
            make: Begins one.
        """
        following = self._iterations
        return self.begun(make if following is None else lambda: following.begun(make))

    def epoch_begins(self) -> None:
        """Notes the place from which an epoch can be read again."""
        if self._is_over():
            self._begin, self._passed_before = None, -self._passed
            self._is_late = False
        self._passed_before, self._passed = self._passed_before + self._passed, 0
        if self._begin is None or not self._goes_on:
            self._begin = self._now(training_state.random_states())
        elif self._is_made:
            self._begin = self._since(self._begin, training_state.random_states())
            self._is_made, self._is_late = False, True
        self._epochs += 1
        self._is_due = True

    def _is_over(self) -> bool:
        """Whether epochs that go on have come to the data's end: Keras begins them again."""
        passed = self._passed_before + self._passed
        return self._goes_on and self._batches is not None and passed >= self._batches > 0

    def batch_begins(self) -> None:
        """Notes where a pipeline is, before the first batch of an epoch is read."""
        if self._is_due and self._goes_on and self._is_read and self._iterations is not None:
            self._note_place(self._iterations.place())

    def _note_place(self, place: bytes | None) -> None:
        """Notes the place of the iterator of this epoch; Keras makes others, to see a batch."""
        if self._is_due:
            self._place, self._is_due, self._is_read = place, False, True

    def batches_passed(self, count: int) -> None:
        """Notes how many batches of the epoch have been trained on.

        Args:
            count: The number.
        """
        self._passed = count

    def kept(self, batches: int, arrays: list[np.ndarray[Any, Any]]) -> dict[str, Any]:
        """Returns what to keep of the place.

        Args:
            batches: How many batches of the epoch have passed; 0 at its end.
            arrays: Those of the backup, to which this one's are added.
        """
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
        """Lets the data go on at a place.

        Args:
            form: What `kept` returned.
            arrays: All arrays of the backup.
            within: Whether that is within an epoch, of which Keras's loop passes over the batches.
        """
        self._source.put_back(form["source"], arrays)
        self._passed_before, self._passed = form["passed"], 0
        self._epochs = form["epochs"]
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
            training_state.set_random_states(random)

    def _since(self, begin: _Begin, random: Mapping[str, Any] | None) -> _Begin:
        """The begin of an iteration that Keras made as an epoch ended."""
        return self._now(random) if self._is_heard_later else replace(begin, random=random)

    def _now(self, random: Mapping[str, Any] | None) -> _Begin:
        forms, arrays = self._source.state(0)
        return _Begin(random, forms, [array.copy() for array in arrays])


@final
class PositionedAdapter(WrappedAdapter):
    """Hands the data to Keras's loop from the place where a run goes on."""

    def __init__(self, inner: Any, position: Position, follow: Callable[..., Any]) -> None:
        """Wraps an adapter.

        Args:
            inner: The adapter of the call's data.
            position: Where the run is in them.
            follow: Lets a function begin the iterations of what TensorFlow's loop takes.
        """
        super().__init__(inner)
        self._position = position
        self._follow = follow

    def get_numpy_iterator(self) -> Iterator[Any]:
        """Returns the inner adapter's batches."""
        yield from self._position.begun(lambda: iter(self._inner.get_numpy_iterator()))

    def get_jax_iterator(self) -> Iterator[Any]:
        """Returns the inner adapter's batches."""
        yield from self._position.begun(lambda: iter(self._inner.get_jax_iterator()))

    def get_tf_dataset(self) -> Any:
        """Returns the inner adapter's batches."""
        return self._follow(self._inner.get_tf_dataset(), self._position.begun_pipeline)

    def get_torch_dataloader(self) -> Any:
        """Returns the inner adapter's batches."""
        return _Loader(self._inner.get_torch_dataloader, self._position)

    @property
    def builtin_prefetch(self) -> bool:
        """As the inner adapter says."""
        return self._inner.builtin_prefetch


@final
class _Loader:
    """What Keras's loop iterates over on PyTorch, where it reads a batch before it says so."""

    def __init__(self, make: Callable[[], Any], position: Position) -> None:
        self._make = make
        self._position = position

    def __iter__(self) -> Iterator[Any]:
        # At once: the iterator of a DataLoader draws a number when it is made.
        return self._read(self._position.begun(lambda: iter(self._make())))

    def _read(self, iterator: Iterator[Any]) -> Iterator[Any]:
        for _ in iter(int, 1):
            self._position.batch_begins()
            try:
                batch = next(iterator)
            except StopIteration:
                return
            yield batch


def _objects_of(source: Any) -> list[Any]:
    """The objects that may change while a source is read."""
    if isinstance(source, keras_seam.PyDataset):
        return [source]
    if keras_seam.is_torch_dataloader(source):
        batches = source.batch_sampler
        within = None if batches is None else getattr(batches, "sampler", None)
        objects = [source.dataset, source.sampler, batches, within]
        different = {id(one): one for one in objects if one is not None}
        return [*different.values(), types.SimpleNamespace(generator=source.generator)]
    return []


def _lost_of(source: Any) -> list[str]:
    if keras_seam.is_torch_dataloader(source) and source.persistent_workers:
        return ["what workers of a DataLoader draw (persistent_workers=False brings it back)"]
    return []
