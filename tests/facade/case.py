"""Declares the cases of this suite, by default on two replicas."""

from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import Any

from tests.conformance import registry

PAIR = (2,)
# The topic of cases about one backend alone, which run here and in no other suite.
OWN = "one backend"


def case(
    function: Callable[[Any], None] | None = None,
    *,
    replicas: tuple[int, ...] = PAIR,
    **options: Any,
) -> Any:
    """Registers a case: ``@case`` alone, or with what ``registry.case`` takes.

    It is given the lab, and its strategy, if it asks for one: ``def name(lab, strategy)``.
    """

    def register(function: Callable[..., None]) -> Callable[..., None]:
        @wraps(function)
        def check(lab: Any) -> None:
            strategies = [lab.strategy()] if "strategy" in signature(function).parameters else []
            function(lab, *strategies)

        registry.case("facade", replicas=replicas, **options)(check)
        return function

    return register if function is None else register(function)


def of_backend(backend: str) -> Callable[[Callable[[Any], None]], Callable[[Any], None]]:
    """Registers a case about one backend's CPU devices, which is given a strategy of two."""

    def register(function: Callable[[Any], None]) -> Callable[[Any], None]:
        @wraps(function)
        def with_strategy(lab: Any) -> None:
            function(lab.strategy())

        title = function.__name__.replace("_", " ")
        if registry.KIND == "cpu":
            registry.case(OWN, backends=(backend,), replicas=PAIR, title=title)(with_strategy)
        return function

    return register
