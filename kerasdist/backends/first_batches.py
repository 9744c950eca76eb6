"""Checks that workers which all read a whole dataset read the same batches.

Each worker takes its own rows of every batch. If workers shuffle the dataset in different orders,
some rows are trained on twice and others never. So workers compare the first batch of each
iteration, at the step that uses it.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, final

import numpy as np

from kerasdist import keras_compat
from kerasdist.errors import DisagreementError
from kerasdist.job.comparison import described_difference
from kerasdist.structures import flatten
from kerasdist.user_warnings import warn_user

if TYPE_CHECKING:
    from kerasdist.job.job import Job

# How many rows of an array are compared, and how many elements of each.
ROWS, ELEMENTS = 16, 1024

# How many of an array's first elements a message shows.
SHOWN = 4

_MEMBERS = ("x", "y", "sample_weight")


class Beginning(NamedTuple):
    """The beginning of an array of a batch, which workers compare.

    Attributes:
        name: Which array of the batch it is, such as ``y``.
        digest: A digest of the array's first rows.
        has_order: Whether these rows differ, so that another order of them has another digest.
        shown: The array's first elements, as text.
    """

    name: str
    digest: str
    has_order: bool
    shown: str


@final
class FirstBatches:
    """The first batch of the last iteration, which workers have not compared yet."""

    def __init__(self, job: Job | None, *, wanted: bool) -> None:
        """Starts without a batch."""
        self._job = job
        self._wanted = wanted
        self._waiting: list[Beginning] | None = None

    def recorded(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Returns the batches of an iteration; the first one is recorded when it is read."""
        if self._job is None:
            return batches
        return itertools.chain(self._first_of(batches), batches)

    def _first_of(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in itertools.islice(batches, 1):
            self._waiting = beginnings(batch) if self._wanted else []
            yield batch

    def clear(self) -> None:
        """Forgets the recorded batch, since a new call begins."""
        self._waiting = None

    def compare(self) -> None:
        """Compares the last iteration's first batch over the workers, if it is new.

        All workers must call it, before a step.
        """
        if self._waiting is not None:
            waiting, self._waiting = self._waiting, None
            self.require_equal(waiting)

    def require_equal(self, beginning: Sequence[Beginning]) -> None:
        """Makes sure that all workers have read the same batch. All workers must call it."""
        job = self._job
        if job is None:
            return
        everyone = job.all_gather_object(
            "first batch of a dataset", beginning if self._wanted else None
        )
        if None in everyone or all(one == everyone[0] for one in everyone):
            return
        columns = [
            [Beginning(*one) for one in column]
            for column in itertools.zip_longest(*everyone, fillvalue=["no array", "", False, ""])
        ]
        named = [
            {one.name: f"{one.shown} (digest {one.digest})" for one in theirs}
            for theirs in zip(*columns, strict=True)
        ]
        said = (
            f"[worker {job.rank}/{job.num_workers}] Expected all workers to read the same batches, "
            f"of which each takes its rows. Received as the first batch: "
            f"{described_difference(named)}. "
        )
        if any(_shows_one_order(column) for column in columns):
            warn_user(f"{said}{_OTHER_VALUES}")
        else:
            raise DisagreementError(f"{said}{_OTHER_ORDER}")


_OTHER_ORDER = (
    "Rows would be trained on twice, and others never. Give what shuffles a seed, the same on all "
    "workers (keras.utils.set_random_seed before the dataset is made, shuffle(n, seed=...), a "
    "seeded generator). If each worker has data of its own, say so: "
    "InputOptions(auto_shard_policy=AutoShardPolicy.OFF), or FILE. If only what is drawn for each "
    "row differs, such as augmentation, KERASDIST_CHECK=off leaves out this comparison."
)

_OTHER_VALUES = (
    "The rows come in the same order, but not all of their values are the same. If that is "
    "augmentation that each worker draws by itself, it does no harm, but a run cannot be repeated: "
    "give it a seed. KERASDIST_CHECK=off leaves out this comparison."
)


def _shows_one_order(column: Sequence[Beginning]) -> bool:
    """Whether an array shows that workers read in one order: it is equal, and its rows differ."""
    return column[0].has_order and all(one == column[0] for one in column)


def names_of(batch: Any) -> list[str]:
    """Returns a name for each leaf of a batch, after Keras's arguments, such as ``x``."""
    is_tuple = isinstance(batch, list | tuple)
    members = zip(_MEMBERS, batch, strict=False) if is_tuple else [("x", batch)]
    names: list[str] = []
    for name, member in members:
        count = len(flatten(member))
        names += [name] if count == 1 else [f"{name}[{index}]" for index in range(count)]
    return names


def beginnings(batch: Any) -> list[Beginning]:
    """Returns the `Beginning` of each dense array of a batch."""
    found: list[Beginning] = []
    for name, leaf in zip(names_of(batch), flatten(batch), strict=False):
        if len(getattr(leaf, "shape", ())) == 0:
            continue
        try:
            found.append(_beginning(name, leaf))
        except Exception:  # noqa: BLE001  sparse, ragged
            continue
    return found


def _beginning(name: str, leaf: Any) -> Beginning:
    rows = np.asarray(keras_compat.ops.convert_to_numpy(leaf[:ROWS]))
    rows = rows.reshape(len(rows), -1)[:, :ELEMENTS] if rows.size else rows.reshape(0, 0)
    data = repr(rows.tolist()).encode() if rows.dtype == object else rows.tobytes()
    has_order = bool((rows != rows[:1]).any())
    shown = ", ".join(
        f"{one:.6g}" if rows.dtype.kind == "f" else str(one) for one in rows.flat[:SHOWN]
    )
    return Beginning(name, hashlib.sha256(data).hexdigest()[:12], has_order, shown)
