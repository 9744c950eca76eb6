"""Checks whether all workers of a job read the same batches.

Each worker takes its own rows of every batch. If workers shuffled a dataset in different orders,
some rows would be used twice and others never. So workers compare the first batch of each
iteration, at the step that uses it, and checksums of all batches at the end of an epoch.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, final

import numpy as np

from kerasdist import keras_compat
from kerasdist.agreement.results import checksum_of
from kerasdist.core.structures import flatten
from kerasdist.core.user_warnings import warn_user
from kerasdist.errors import DisagreementError
from kerasdist.job.comparison import ADVICE, BatchHistory, Report, digest
from kerasdist.job.job import Job

# Of each array in the first batch, the first `ROWS` rows are compared, and the first `ELEMENTS`
# elements of each of these rows.
ROWS, ELEMENTS = 16, 1024

# How many bytes of an array the checksum of a batch covers. If an array is larger, the checksum
# covers some elements of each row, and the checksum of the next batch covers other elements.
BYTES = 1 << 16

# How many of an array's first elements a message shows.
SHOWN = 4

_MEMBERS = ("x", "y", "sample_weight")


class Beginning(NamedTuple):
    """The beginning of one array of a batch, which the workers compare.

    Attributes:
        name: The name of the array, such as ``y``.
        has_order: Whether the array's first rows differ from each other, so that another order of
            the rows changes the checksum.
        shown: The array's first elements, and a checksum of its first rows.
    """

    name: str
    has_order: bool
    shown: str


@final
class FirstBatches:
    """Records the batches of datasets that all workers read, until the workers compare them.

    Attributes:
        drawn_by_threads: Whether several threads of the data source, such as of a ``PyDataset``,
            draw random numbers, so that each worker draws different numbers.
        history: The forms (shapes and types) of global batches that were not yet compared.
    """

    def __init__(
        self, job: Job | None, *, wanted: bool, count_begun: Callable[[], int] | None = None
    ) -> None:
        """Starts without batches. The class `BatchHistory` explains `count_begun`.

        If `wanted` is False, the values of batches are neither recorded nor compared.
        """
        self.history = BatchHistory(count_begun)
        self.drawn_by_threads = False
        self._job = job
        # The strategy has checked that `wanted` is equal on all workers. So no worker waits in a
        # comparison that other workers leave out.
        self._wanted = wanted and job is not None
        self._waiting: list[Beginning] | None = None
        # The names of the arrays of a batch, by the number of arrays that the batch has.
        self._names: dict[int, list[str]] = {}
        # The keys are names of arrays. `_checksums` has the checksum of an array in each batch. For
        # each iteration over the data, `_begins` has how many batches were read before it.
        self._checksums: dict[str, array[int]] = {}
        self._begins: dict[str, list[int]] = {}
        # Names of arrays that differed between workers, as with random augmentation. A warning has
        # reported these arrays, and they are not reported again.
        self._drawn: set[str] = set()

    def recorded(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Returns the batches of an iteration, and records each one when it is read."""
        return self._noted(batches) if self._wanted else batches

    def _noted(self, batches: Iterator[Any]) -> Iterator[Any]:
        for number, batch in enumerate(batches):
            if number == 0:
                named = self.begin(batch)
            self.note([_checksum(leaf, number) for leaf in flatten(batch)[:named]])
            yield batch

    def begin(self, batch: Any) -> int:
        """Records the first batch of an iteration; returns how many of its arrays have names."""
        self._waiting, names = beginnings(batch), names_of(batch)
        self._names[len(names)] = names
        for name in names:
            self._begins.setdefault(name, []).append(len(self._checksums.get(name, ())))
        return len(names)

    def note(self, sums: Sequence[int]) -> None:
        """Stores the checksums of a batch's arrays."""
        if self._wanted:
            numbers = [f"array {number}" for number in range(len(sums))]
            for name, one in zip(self._names.get(len(sums), numbers), sums, strict=True):
                self._checksums.setdefault(name, array("Q")).append(one)

    def require_equal_since(self, when: str) -> None:
        """Raises DisagreementError if workers have trained on different batches.

        Only batches since the last call are compared. All workers must call this method.
        """
        job = self._job
        if job is None:
            return
        report = self.history.end()
        (read, self._checksums), (begins, self._begins) = (self._checksums, {}), (self._begins, {})
        sums_of_all = {name: sums.tobytes().hex() for name, sums in read.items()}
        facts = [report["steps"], report["changes"], sums_of_all]
        are_equal = job.all_have_one(f"batches before {when}", digest(facts))
        self.history.clear()
        if are_equal:
            return
        forms = _forms(report)
        at = job.first_difference(f"sizes of batches before {when}", forms)
        if at is not None:
            own = forms[at] if at < len(forms) else "none, at the end of its data"
            job.assert_equal(f"batches before {when}", {f"batch {at + 1}": own}, ADVICE)
        texts = {name: [f"{one:08x}" for one in sums] for name, sums in read.items()}
        self._require_equal(texts, begins, when)

    def _require_equal(
        self,
        read: Mapping[str, Sequence[str]],
        begins: Mapping[str, Sequence[int]],
        when: str,
        ordered: Iterable[str] | None = None,
    ) -> None:
        """Reports the earliest batch that differs between workers.

        All workers must call this method. Without `ordered`, the report is a warning if several
        threads draw random numbers for the data, else an error. `ordered` has the names of arrays
        in which the rows of a batch differ from each other. If one of these arrays is equal on all
        workers, all workers have the same order of rows, and the report is a warning. Otherwise it
        is an error.
        """
        job = self._job
        assert job is not None
        job.assert_equal(f"arrays of batches before {when}", dict.fromkeys(read), _OTHER_ORDER)
        apart = {
            name: job.first_difference(f"{name} of batches before {when}", texts)
            for name, texts in read.items()
        }
        drawn = self.drawn_by_threads
        if ordered is not None:
            drawn = any(apart[name] is None for name in ordered)
        found = [(at, name) for name, at in apart.items() if at is not None]
        facts: dict[str, str] = {}
        for at, name in sorted(one for one in found if one[1] not in self._drawn):
            begin = max((one for one in begins.get(name, ()) if one <= at), default=0)
            facts[f"{name} of batch {at - begin + 1}"] = next(iter(read[name][at:]), "none")
        label = f"batches before {when}, of which each takes its rows"
        try:
            job.assert_equal(label, facts, _OTHER_VALUES if drawn else _OTHER_ORDER)
        except DisagreementError as error:
            if not drawn:
                raise
            self._drawn.update(name for _, name in found)
            warn_user(str(error))

    def clear(self) -> None:
        """Forgets all recorded batches, because a new call such as `fit` begins."""
        self._waiting = None
        self._checksums.clear()
        self._begins.clear()
        self._drawn.clear()

    def compare(self) -> None:
        """Compares the first batch of the current iteration, unless workers have compared it.

        All workers must call this method before a step.
        """
        own, self._waiting, job = self._waiting, None, self._job
        if own is None or job is None or not self._wanted:
            return
        if not job.all_have_one("first batch of a dataset", own):
            read = {one.name: [one.shown] for one in own}
            ordered = [one.name for one in own if one.has_order]
            self._require_equal(read, {}, "the next step", ordered)


def _forms(report: Report) -> list[str]:
    """Returns the shapes and types of each batch in a report."""
    ends = [*(at for at, _ in report["changes"][1:]), report["steps"]]
    each = zip(report["changes"], ends, strict=False)
    return [form for (begin, form), end in each for _ in range(begin, end)]


_OTHER_ORDER = (
    "Some rows would be trained on twice, and others never. Shuffle with a seed that is equal on "
    "all workers (keras.utils.set_random_seed before the dataset is made, "
    "shuffle(n, seed=...), a seeded generator). If each worker has data of its own, say so: "
    "InputOptions(auto_shard_policy=AutoShardPolicy.OFF), or FILE. If only what is drawn for each "
    "row differs, such as augmentation, KERASDIST_CHECK=off leaves out this comparison."
)

_OTHER_VALUES = (
    "The rows come in the same order, but some of their values differ. If the reason is "
    "augmentation that each worker draws by itself, training is correct, but cannot be repeated "
    "exactly: give the augmentation a seed. KERASDIST_CHECK=off leaves out this comparison."
)


def _checksum(leaf: Any, number: int) -> int:
    """Returns a checksum of an array in the batch with this number; 0 if the array is not dense."""
    try:
        rows = leaf
        if len(leaf.shape) and math.prod(leaf.shape) * leaf.dtype.itemsize > BYTES:
            rows = leaf.reshape(leaf.shape[0], -1)
            length = rows.shape[1]
            each = max(BYTES // (len(rows) * leaf.dtype.itemsize), 1)
            begin = number * each % length
            rows = rows[:, begin : begin + each]
        return checksum_of(keras_compat.ops.convert_to_numpy(rows))
    except Exception:  # noqa: BLE001  sparse or ragged arrays, or Python objects
        return 0


def names_of(batch: object) -> list[str]:
    """Returns a name for each array of a batch, by the argument of `fit`: ``x``, or ``y[0]``."""
    is_tuple = isinstance(batch, list | tuple)
    members = zip(_MEMBERS, batch, strict=False) if is_tuple else [("x", batch)]
    names: list[str] = []
    for name, member in members:
        count = len(flatten(member))
        names += [name] if count == 1 else [f"{name}[{index}]" for index in range(count)]
    return names


def beginnings(batch: object) -> list[Beginning]:
    """Returns the `Beginning` of each dense array of a batch."""
    found: list[Beginning] = []
    for name, leaf in zip(names_of(batch), flatten(batch), strict=False):
        if len(getattr(leaf, "shape", ())) == 0:
            continue
        try:
            found.append(_beginning(name, leaf))
        except Exception:  # noqa: BLE001  sparse or ragged arrays
            continue
    return found


def _beginning(name: str, leaf: Any) -> Beginning:
    rows = np.asarray(keras_compat.ops.convert_to_numpy(leaf[:ROWS]))
    rows = rows.reshape(len(rows), -1)[:, :ELEMENTS] if rows.size else rows.reshape(0, 0)
    has_order = bool((rows != rows[:1]).any())
    shown = ", ".join(
        f"{one:.6g}" if rows.dtype.kind == "f" else str(one) for one in rows.flat[:SHOWN]
    )
    return Beginning(name, has_order, f"{shown} (checksum {checksum_of(rows):08x})")
