"""What a case works with: the lab of the suite that it is from, on emulated accelerators."""

from collections.abc import Callable
from typing import Any

from tests.conformance import lab as conformance
from tests.conformance.lazy import keras
from tests.conformance.registry import Item
from tests.facade import lab as facade
from tests.gpu_like import emulation


def labs(*, mirrored: bool) -> Callable[[Item], Any]:
    emulation.install(keras.backend.backend())
    of_conformance = conformance.labs(mirrored=mirrored)
    of_facade = facade.labs(mirrored=mirrored)

    def lab(item: Item) -> Any:
        return (of_facade if item.case.name.startswith("facade.") else of_conformance)(item)

    return lab
