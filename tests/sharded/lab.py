"""What a case works with: the lab of the suite that it is from, with state that is sharded."""

from collections.abc import Callable
from typing import Any

from tests.conformance import lab as conformance
from tests.conformance.lazy import kd
from tests.conformance.registry import Item
from tests.facade import lab as facade


class ShardedLab(conformance.Lab):
    def strategy(self, **options):
        return super().strategy(**{"sharding": sharding_of(self.case.name), **options})


class ShardedFacade(facade.Lab):
    def __init__(self, item: Item):
        super().__init__(item)
        self._sharding = sharding_of(item.case.name)

    def strategy(self, replicas: int | None = None) -> Any:
        return super().strategy(replicas, sharding=self._sharding)


def sharding_of(name: str) -> Any:
    """By the first part of a case's name; no variable is too small to be sharded."""
    return kd.Sharding("optimizer" if name.startswith("optimizer.") else "full", min_size=1)


def labs(*, mirrored: bool) -> Callable[[Item], Any]:
    if not mirrored:
        raise ValueError("Expected replicas, which divide the state. Drop --plain.")
    from kerasdist.backends.jax.mesh import gathers

    gathers.GROUP_BYTES = 1  # each weight is gathered alone, and again going backward
    plain = conformance.PlainOutcomes()

    def lab(item: Item) -> Any:
        if ".facade." in item.case.name:
            facade.fresh()
            return ShardedFacade(item)
        return ShardedLab(item.case, item.backend, item.replicas, plain, mirrored)

    return lab
