"""How a case of this suite is declared: on two replicas, where nothing else is said."""

from collections.abc import Callable
from typing import Any

from tests.conformance import registry

PAIR = (2,)


def case(
    function: Callable[[Any], None] | None = None,
    *,
    replicas: tuple[int, ...] = PAIR,
    **options: Any,
) -> Any:
    """Registers a case: ``@case`` alone, or with what ``registry.case`` takes."""
    register = registry.case("facade", replicas=replicas, **options)
    return register if function is None else register(function)
