"""The position of a run in its data, and how another process returns to that position.

The states of all random generators are saved before each epoch, together with the changed
attributes of the data source. (If `fit` has ``steps_per_epoch`` and the data continue from epoch to
epoch, this state is saved only before the first epoch.) After a restart, the source is read again
from this state and yields the same batches. Batches that were already trained on are skipped.

Iterators of ``tf.data`` and Grain pipelines can save their place in the data and continue from that
place. Loaders with ``state_dict`` and ``load_state_dict`` can, too. After a restart, such sources
are read from the last saved place, without reading earlier batches again.

Keras's loops may read batches before the steps need them. So if Python code reads the data (and not
a TensorFlow graph), the place is saved while the data are read, after each batch at which a backup
may be due.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import Any, final

from kerasdist import keras_compat
from kerasdist.backends.base import random_states
from kerasdist.callbacks.backup.encoding import Encoder, Remembering, decode
from kerasdist.callbacks.backup.interval import Interval
from kerasdist.input.autoshard import OwnSource, WorkerBatches
from kerasdist.input.fit_adapter import Rounds, WrappedAdapter
from kerasdist.input.sources import samplers_of

Place = Mapping[str, Any]
"""A place in a data source, in the form that a backup stores.

``count``: how many batches of the iteration come before the place. ``forms``: a list of two encoded
values. The first is the state of the iterator. The second has the changed attributes of objects
inside of the source (such as a loader's dataset).
"""


@final
@dataclass
class Places:
    """Records places of the newest iteration over a data source; begins iterations at such places.

    Each iteration over a ``tf.data`` pipeline draws the seeds of its shuffles when it begins. So
    for a backup between two epochs, the iterator of the next epoch is made in advance, and its
    place is saved. When Keras asks for the iterator of the next epoch, Keras gets this iterator. A
    backup within an epoch also contains the place at the beginning of the next epoch, because a
    pipeline's place no longer contains the seeds once the shuffle has been read to the end.

    Attributes:
        source: The source of the data.
        parts: Objects inside of the source, such as a loader's dataset, which may change although
            the source itself does not.
        is_due: A function that returns whether a backup may need the place after a given number of
            batches.
        read_by_python: Whether Python code reads the source; if not, TensorFlow's graphs read it.
    """

    source: object
    parts: Remembering
    is_due: Callable[[int], bool]
    read_by_python: bool

    def __post_init__(self) -> None:
        self._kept: list[Place] = []
        self._make: Callable[[], object] | None = None
        self._last: object = None
        self._ahead: object = None
        self._to: Place | None = None
        self._ahead_to: Place | None = None

    def begun(self, make: Callable[[], object]) -> object:
        """Returns an iterator over the source, from its beginning or the place given to `go_to`."""
        self._make = make
        ahead, self._ahead = self._ahead, None
        to, self._to = self._to, None
        first = make if ahead is None else lambda: ahead
        count = 0
        if to is None:
            self._last = first()
        else:
            count, (place, parts) = to["count"], to["forms"]
            self._last = keras_compat.begun_at(self.source, first, decode(place))
            self.parts.put_back(parts)
        if self._ahead_to is not None:
            [place, _], self._ahead_to = self._ahead_to["forms"], None
            self._ahead = keras_compat.begun_at(self.source, make, decode(place))
        self._kept = self._now(self._last, count)
        return self._followed(self._last, count) if self.read_by_python else self._last

    def _followed(self, iterator: Any, count: int) -> Iterator[object]:
        for batch in iterator:
            count += 1
            if self._last is iterator and self.is_due(count):
                self._kept += self._now(iterator, count)
            yield batch

    def newest(self, count: int) -> Place | None:
        """Returns the latest place after at most `count` batches; None if no such place is saved.

        Places before the returned one are forgotten.
        """
        if self._to is not None:  # after `go_to` no batch was read, as the epoch had none left
            return self._to
        if not self.read_by_python and self._last is not None and self.is_due(count):
            self._kept = self._now(self._last, count)
        there = [one for one in list(self._kept) if one["count"] <= count]
        del self._kept[: max(len(there) - 1, 0)]
        return there[-1] if there else None

    def next(self) -> Place | None:
        """Returns the place where the next iteration begins.

        The result is None if no such place is saved, because that iteration simply begins at the
        beginning of the data.
        """
        if self._to is not None:  # no batch was read since `go_to`
            return self._to
        if self._make is None or not keras_compat.is_tf_dataset(self.source):
            return None
        if self._ahead is None:
            self._ahead = self._make()
        return next(iter(self._now(self._ahead, 0)), None)

    def go_to(self, place: Place, following: Place | None) -> None:
        """Lets the next iteration continue from a place.

        `following` is the place where the iteration after that one begins; None means the
        beginning of the data.
        """
        self._to, self._ahead_to = place, following

    def _now(self, iterator: object, count: int) -> list[Place]:
        """Returns a list with the iterator's place; an empty list if this place cannot be saved."""
        encoder = Encoder()
        place = keras_compat.place_of(self.source, iterator)
        form = encoder.encode(place, "the place in the data")
        if encoder.lost:
            return []
        return [copy.deepcopy({"count": count, "forms": [form, self.parts.state()]})]


_Make = Callable[[], Any]

_Begin = Mapping[str, Any]
"""The state before an iteration over the data, in the form that a backup stores.

``random``: the states of the random generators; None if they are stored elsewhere in the backup.
``source``: the changed attributes of the data source, encoded. ``epochs read``: how many epochs
Keras's adapter has read; None if the order of the data does not depend on this number.
"""


@final
class Position:
    """The position of a run in the data of its `fit`.

    Attributes:
        facts: Facts about the data that must be equal in a run that continues from this position.
        unread: After a restart, how many batches of the present epoch are skipped without being
            read again.
    """

    def __init__(
        self, source: Any = None, steps: int | None = None, *, begins_anew: bool = False
    ) -> None:
        """Stores the data, and how many batches an epoch of `fit` reads (None: all batches).

        If ``steps`` is a number, each epoch continues where the previous epoch stopped. But with
        ``begins_anew`` each epoch reads from the beginning, as validation does.
        """
        self.facts: dict[str, object] = {}
        self._source = Remembering(_objects_of(source))
        self._steps, self._begins_anew = steps, begins_anew
        self._continues = steps is not None and not begins_anew
        self._places: Places | None = None
        self._read_by_python, self._draws = True, False
        self._lost: list[str] = []
        if keras_compat.is_torch_dataloader(source) and source.persistent_workers:
            self._lost.append("what workers of a DataLoader draw (pass persistent_workers=False)")
        if begins_anew and isinstance(source, Iterator):
            self._lost.append("the place of a generator (pass data that can be read again)")
        self._read_ahead: Sequence[Any] | None = None
        self._begin: _Begin | None = None
        self._calls_python = False
        self._interval: Interval | None = None
        self._at_once = 1
        self._passed_before, self._passed = 0, 0
        self._resume: Callable[[_Make], object] | None = None
        self._epochs = 0
        self._adapter: Any = None
        self._length: int | None = None
        self.unread = 0
        self._is_made = self._is_late = False
        self._ends_later = isinstance(source, keras_compat.PyDataset)
        self._pass_epochs: Callable[[int], None] | None = None

    def backs_up(self, interval: Interval, at_once: int) -> None:
        """Stores the object that decides after which batches backups are due.

        ``at_once``: how many batches one call of Keras's train function takes.
        """
        self._interval, self._at_once = interval, at_once

    def follow(self, adapter: Any) -> None:
        """Stores Keras's data adapter.

        If the adapter's source of data can save how far it was read, a `Places` object records
        this while the data are read.
        """
        self._adapter = adapter
        if keras_compat.shuffles_without_seed(adapter):
            self._lost.append(
                "the order of the arrays, which TensorFlow shuffles without a seed (call "
                "keras.utils.set_random_seed)"
            )
        if keras_compat.reads_past_epochs(adapter):
            self._lost.append("the batches that a PyDataset's workers have read ahead (workers=1)")
        if isinstance(adapter, WorkerBatches):
            self.facts["workers that read their own part"] = adapter.num_workers
            self._follow_own(adapter.source)
        else:
            # These facts do not depend on the number of workers. So they must be equal after a
            # restart with another number of workers, too.
            self.facts["batch_size"] = adapter.batch_size
            self.facts["number of batches"] = adapter.num_batches
        self._length = adapter.num_batches
        batches = self._length if self._continues else None
        if batches is not None and batches != self._steps:
            self._lost.append(
                f"the place in data of {batches} batches, since an epoch takes "
                f"steps_per_epoch={self._steps} (make both numbers equal, or repeat the data)"
            )
        source = keras_compat.source_of(adapter)
        if source is None:
            return
        if keras_compat.is_tf_dataset(source):
            facts = keras_compat.facts_of(source)
            self._lost += [f"in the tf.data pipeline: {one}" for one in facts.unrepeatable]
            self._calls_python = facts.calls_python
            if batches is not None:
                self._lost.append(
                    f"the place in a tf.data pipeline with an end, with steps_per_epoch="
                    f"{self._steps} (repeat it, or leave steps_per_epoch out)"
                )
            if facts.calls_python or (facts.draws if self._continues else facts.is_cached):
                if not facts.is_cached and not self._continues:
                    self._pass_epochs = partial(keras_compat.begin_often, source)
                return  # no places are saved: a restarted run reads from the beginning
            self._read_by_python = not keras_compat.is_native_dataset(source)
            self._draws = facts.draws
        elif batches is not None:
            return
        self._places = Places(source, self._source, self._is_due, self._read_by_python)
        if self._read_by_python:
            keras_compat.follow_source(adapter, source, self._places.begun)

    def _is_due(self, count: int) -> bool:
        """Returns whether the place after `count` batches must be saved.

        This is necessary if a backup may be due at this place, and can use the place.
        """
        if self._draws or not self._read_by_python:
            # If the pipeline draws random numbers, its place cannot be used within an epoch: the
            # place does not contain the state of these draws.
            return not self._draws
        if self._steps is not None:
            count %= self._steps
        if count in (0, self._length):
            return self._continues
        if self._interval is None or count % self._at_once:
            return False
        return self._interval.is_due(count, count - self._at_once)

    def _follow_own(self, source: OwnSource) -> None:
        """Prepares to continue in data of which each worker reads its own part.

        Stores the function that skips whole epochs of this worker's part, and texts about what
        cannot be restored. The chief, which writes the backups, does not read the other workers'
        parts, so it cannot save a place in them.
        """
        self._pass_epochs = source.pass_epochs
        if isinstance(source.dataset, Rounds):
            self._lost.append("the place in pipelines that a function makes for each worker")
        elif isinstance(source.dataset, keras_compat.PyDataset):
            self._lost.append("what a PyDataset remembers, since each worker reads a part of it")

    def lost(self) -> list[str]:
        """Returns lines of text, each about something that a backup cannot restore."""
        lost = [*self._lost, *self._source.lost()]
        if self._calls_python and self._begin is not None:
            now, before = random_states.kept(), self._begin["random"]
            if (now["numpy"], now["python"]) != (before["numpy"], before["python"]):
                how = "for a tf.data pipeline, which reads ahead (seed a generator when it begins)"
                lost.append(f"what Python draws {how}")
        reads_some = self._begins_anew and self._steps not in (None, self._length)
        is_read_ahead = keras_compat.backend_name() == "tensorflow"
        if reads_some and is_read_ahead and self._source.has_changed:
            lost.append(
                f"what changes while TensorFlow reads ahead, since of {self._length} batches only "
                f"validation_steps={self._steps} are used (leave validation_steps out)"
            )
        return lost

    def begun(self, make: Callable[[], Any]) -> Any:
        """Returns an iterator over the data, at the position from which the run continues."""
        resume, self._resume = self._resume, None
        if resume is not None:
            return resume(make)
        if self._is_over():
            # On some backends Keras restarts the data before it calls `on_epoch_end`, so the state
            # before the new iteration is stored here.
            self._begin = self._now(random_states.kept())
            self._passed_before = -self._passed
            self._is_made = True
        return make()

    def _begin_again(
        self, passed: int, random: Mapping[str, object], within: bool, late: bool, make: _Make
    ) -> object:
        """Returns an iterator over the data, at the position that the backup contains.

        Args:
            passed: How many batches of the new iterator the saved run had already read. They are
                read here and ignored.
            random: The states of the random generators at the beginning of the iteration.
            within: Whether the run continues within an epoch. Then the random generators are
                restored later, after the skipped steps.
            late: Whether Keras had made the saved run's iterator before the epoch began, when the
                random generators had other states.
            make: A function that makes the new iterator. It begins at the beginning of the data, or
                at the place in the backup if there is one.
        """
        now = random_states.kept()
        if not late:
            random_states.put_back(random)
        iterator = make()
        if late:
            random_states.put_back(random)
        for _ in range(passed):
            next(iterator, None)
        if not within:
            self.restore_random_states(now, random)
        return iterator

    def restore_random_states(
        self, states: Mapping[str, object], begin: Mapping[str, object] | None = None
    ) -> None:
        """Sets the random generators to the states of a backup.

        TensorFlow reads Python sources ahead, in another thread. If that thread draws random
        numbers from the global generators, their states have already advanced with the batches, and
        this method leaves them unchanged. `begin` has the states before the batches were read; None
        means the states that `epoch_begins` has stored.
        """
        if keras_compat.reads_aside(WrappedAdapter.innermost(self._adapter)):
            before = begin or (self._begin["random"] if self._begin is not None else None)
            if before is not None and random_states.kept() != before:
                return
        random_states.put_back(states)

    def begun_pipeline(self, make: Callable[[], Any]) -> Any:
        """Like `begun`; if TensorFlow reads the data, the iterator begins at their saved place."""
        places = None if self._read_by_python else self._places
        return self.begun(make if places is None else lambda: places.begun(make))

    def epoch_begins(self) -> None:
        """Stores the state from which the epoch can be read again."""
        if self._is_over():
            self._begin, self._passed_before = None, -self._passed
            self._is_late = False
        self._passed_before, self._passed = self._passed_before + self._passed, 0
        if self._begin is None or not self._continues:
            self._begin = self._now(random_states.kept())
        elif self._is_made:
            self._begin = self._since(self._begin, random_states.kept())
            self._is_made, self._is_late = False, True
        self._epochs += 1
        self._read_ahead = None

    @contextmanager
    def looked_at(self) -> Generator[None]:
        """After a restart, undoes the changes that reading one batch makes in the data source.

        In the block of this context manager, Keras reads this batch only to find its types.
        """
        random = random_states.kept()
        yield
        if self._read_ahead is not None:
            self._source.put_back(self._read_ahead)
            random_states.put_back(random)

    def _is_over(self) -> bool:
        """Returns whether all data are read, so that Keras starts again from their beginning.

        This happens only if the data continue across epochs.
        """
        passed = self._passed_before + self._passed
        return self._continues and self._length is not None and passed >= self._length > 0

    def batches_passed(self, count: int) -> None:
        """Stores how many batches of the epoch were trained on."""
        self._passed = count

    def kept(self, batches: int) -> dict[str, object]:
        """Returns the position in the form that a backup contains."""
        begin, places = self._begin, self._places
        goes_on = self._continues and not (self._is_over() and not batches)
        passed = self._passed_before + (0 if batches else self._passed)
        if not batches and not goes_on:
            begin, passed = self._now(None), 0
        assert begin is not None  # because `epoch_begins` was called
        if goes_on and not batches and self._is_made:
            begin = self._since(begin, begin["random"])
        place = following = None
        if places is not None:
            before = passed if goes_on else 0
            place = places.newest(before + batches) if batches or goes_on else places.next()
            following = places.next() if batches and place is not None and not goes_on else None
        return {
            **begin,
            "passed": passed,
            "late": self._is_late and bool(batches),
            "epochs": self._epochs - (1 if batches else 0),
            "place": place,
            "next place": following,
        }

    def go_to(self, form: Mapping[str, Any], *, within: bool) -> None:
        """Continues from a position that a backup contains."""
        self._read_ahead = form["source"]
        self._source.put_back(form["source"])
        self._passed_before, self._passed = int(form["passed"]), 0
        self._epochs = int(form["epochs"])
        keras_compat.set_epochs_read(self._adapter, form.get("epochs read"))
        if self._pass_epochs is not None and not self._continues:
            self._pass_epochs(self._epochs)
        passed, read = self._passed_before if self._continues else 0, 0
        if form["place"] is not None and self._places is not None:
            read = int(form["place"]["count"])
            self._places.go_to(form["place"], form["next place"])
        self.unread = max(read - passed, 0)
        random = form["random"]
        if random is None:
            return
        if self._continues:
            self._begin, self._is_late = self._now(random), form["late"]
            skipped = max(passed - read, 0)
            self._resume = partial(self._begin_again, skipped, random, within, self._is_late)
        else:
            random_states.put_back(random)

    def _since(self, begin: _Begin, random: Mapping[str, object] | None) -> _Begin:
        """Returns the state before an iteration that Keras began when the previous epoch ended."""
        if self._ends_later:
            return self._now(random)
        # Keras draws the order of the rows only with the first batch. So the random states of that
        # time (`random`) replace the states in `begin`.
        return {**begin, "random": random, "epochs read": keras_compat.epochs_read(self._adapter)}

    def _now(self, random: Mapping[str, object] | None) -> _Begin:
        return {
            "random": random,
            "source": copy.deepcopy(self._source.state()),
            "epochs read": keras_compat.epochs_read(self._adapter),
        }


@final
class PositionedAdapter(WrappedAdapter):
    """Passes the data to Keras's loop from the position at which the run continues."""

    def __init__(self, inner: Any, position: Position) -> None:
        super().__init__(inner)
        self._position = position

    def begun(self, make: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Returns the inner adapter's batches, from the run's position on."""
        return self._position.begun(make)

    def get_jax_iterator(self, super_batch: int | None = None) -> Iterator[Any]:
        """Returns the batches; the iteration begins when the first one is read."""
        yield from super().get_jax_iterator(super_batch)

    def get_tf_dataset(self) -> Any:
        """Returns the inner adapter's batches, from the run's position on."""
        with self._position.looked_at():
            return self._inner.get_tf_dataset(self._position.begun_pipeline)

    def get_torch_dataloader(self) -> Iterator[object]:
        """Returns the inner adapter's batches, from the run's position on."""
        # When an iteration begins, it may draw a random number. So, as in Keras's own adapter, it
        # begins now and not with the first batch.
        return self._read(super().get_torch_dataloader())

    def _read(self, iterator: Iterator[object]) -> Iterator[object]:
        """Yields batches to Keras's loop on PyTorch; None for a batch that the loop must skip."""
        unread, self._position.unread = self._position.unread, 0
        yield from repeat(None, unread)
        yield from iterator


def _objects_of(source: Any) -> list[object]:
    """Returns the objects that may change while a source is read."""
    if isinstance(source, keras_compat.PyDataset):
        return [source]
    if keras_compat.is_torch_dataloader(source):
        generator = types.SimpleNamespace(generator=source.generator)
        return [source.dataset, *samplers_of(source), generator]
    return []
