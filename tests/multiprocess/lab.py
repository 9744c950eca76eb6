"""What a case works with in one worker of a group."""

import base64
import contextlib
import pickle
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.conformance.lab import Lab, Outcome, PlainOutcomes, plain_values
from tests.conformance.lazy import kd
from tests.conformance.registry import KIND, Case, Item
from tests.multiprocess.layouts import Layout


class WorkersLab(Lab):
    """The lab of a worker: every strategy is over all workers of the group."""

    def __init__(self, case: Case, backend: str, layout: Layout, plain: PlainOutcomes, main: Any):
        super().__init__(case, backend, layout.replicas, plain, mirrored=True)
        self._layout = layout
        self._main = main

    @property
    def job(self) -> Any:
        return self._main.replica_set.job

    @property
    def shards(self) -> int:
        """How many devices divide a variable."""
        return self._layout.shards

    @property
    def number_of_shard(self) -> int:
        """That of this worker's first device."""
        return self.job.rank * self._layout.devices % self.shards

    @property
    def is_last(self) -> bool:
        return self.job.rank == self.job.num_workers - 1

    def pick(self, one: Any, other: Any) -> Any:
        """What the last worker has, and what the others have."""
        return one if self.is_last else other

    def everyone(self, value: Any) -> list[Any]:
        return self.job.all_gather_object("what everyone has", value)

    def plain_outcome(self, build, actions) -> Outcome:
        """What plain Keras gives on the chief, for all workers: it would be the same on each."""
        told = ""
        if self.job.is_chief:
            try:
                outcome = super().plain_outcome(build, actions)
            except Exception as error:  # noqa: BLE001 (raised below, on all workers)
                outcome = error
            told = base64.b64encode(pickle.dumps(outcome)).decode()
        outcome = pickle.loads(base64.b64decode(self.everyone(told)[0]))
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def alike(self, value: Any):
        """All workers have the same."""
        shown = repr(plain_values(value))
        everyone = self.everyone(shown)
        self.check(len(set(everyone)) == 1, f"workers differ: {everyone}")

    @contextlib.contextmanager
    def folder(self) -> Iterator[Path]:
        """A folder that all workers see, gone afterwards."""
        with contextlib.ExitStack() as stack:
            own = stack.enter_context(tempfile.TemporaryDirectory()) if self.job.is_chief else ""
            yield Path(self.everyone(own)[0])
            self.everyone("done")

    def strategy(self, **options):
        if not options:
            return self._main
        sharding = self._main.replica_set.options.sharding
        given: dict[str, Any] = {"sharding": sharding}
        if KIND == "cpu":  # an earlier case may have asked for more devices
            given["devices"] = [f"cpu:{index}" for index in range(self._layout.devices)]
        return kd.MultiWorkerMirroredStrategy(**given | options)

    def with_replicas(self, replicas: int) -> "WorkersLab":
        del replicas
        return self


def sharding_of(layout: Layout) -> Any:
    """The strategy's argument `sharding`; no variable is too small to be sharded."""
    if layout.sharding is None:
        return None
    return kd.Sharding(layout.sharding, min_size=1, within=layout.within)


def labs(strategy: Any, layout: Layout) -> Callable[[Item], WorkersLab]:
    plain = PlainOutcomes()
    return lambda item: WorkersLab(item.case, item.backend, layout, plain, strategy)
