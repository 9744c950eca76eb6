"""The catalogue of cases. Imports no framework, so that pytest can parametrise over it.

A suite is a package with modules or packages ``cases_*`` and a module ``lab``. Its ``labs`` makes
what a case works with. A case is a function of one argument, the ``Lab``::

    @case("losses")
    def sum_reduction(lab):
        "Loss reduction `sum`."
        lab.same(build, fit(x, y))

Its docstring's first line is its title in docs/support.md.
"""

import functools
import importlib
import os
import pkgutil
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.environment import everything

BACKENDS = ("tensorflow", "jax", "torch")
# It compiles and traces nothing: a case takes a tenth of what it takes on the others. `make test`
# runs each case there, and on the others the first case of each theme; `make test-slow` the rest.
CHEAPEST = "torch"
# The devices of the suites: a kind, and how many if the numbers below do not hold. On ``gpu:1``
# (`make gpu`) cases run on one replica, but for those that ask for other numbers.
SUITES_ON = "KERASDIST_SUITES_ON"
KIND, _, _COUNT = os.environ.get(SUITES_ON, "cpu").partition(":")
REPLICAS = (int(_COUNT),) if _COUNT else (2, 3, 4)
SECONDS = 900.0
EXTRA_CASES = "KERASDIST_CONFORMANCE_EXTRA_CASES"
CONFORMANCE = "tests.conformance"
# Themes whose cases run in a process of their own with no setting of `tests.environment`.
AS_USERS_HAVE_IT = ("layers.",)


@dataclass(frozen=True)
class Case:
    name: str
    topic: str
    title: str
    function: Callable[[Any], None]
    backends: tuple[str, ...] = BACKENDS
    replicas: tuple[int, ...] = REPLICAS
    # Where a backend can't have the feature: the error that the user must see there.
    refused: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    # Where a backend passes with a declared exemption: one sentence for the support table.
    limitation: Mapping[str, str] = field(default_factory=dict)
    seconds: float = SECONDS
    # The case that takes the same path through kerasdist: on the backends where a case costs most,
    # `make test-everything` alone runs this one.
    like: str = ""


@dataclass(frozen=True)
class Item:
    """One case on one backend with one number of replicas: what pytest calls a test."""

    case: Case
    backend: str
    replicas: int

    @property
    def key(self) -> str:
        return f"{self.case.name}-x{self.replicas}"


# By suite and name.
CASES: dict[tuple[str, str], Case] = {}


def case(
    topic: str,
    *,
    replicas: tuple[int, ...] | None = None,
    name: str | None = None,
    title: str | None = None,
    **options: Any,
):
    """Registers a `Case`; ``name`` and ``title`` are for those that a loop makes.

    ``replicas=None``: 2, and one of 3 and 4, chosen by the name. `make test` and `make test-slow`
    run what is about at most 2 replicas, and what is ``like`` another case on PyTorch alone; `make
    test-everything` the rest, but what is ``like`` another with 2 alone on TensorFlow and JAX."""

    def register(function):
        # A theme of many cases is a package, of which the modules are not named.
        package, _, theme = function.__module__.rpartition("cases_")
        theme = theme.partition(".")[0] if package else theme
        suite = package.rstrip(".") or CONFORMANCE
        full_name = f"{theme}.{name or function.__name__}"
        shown = title or (function.__doc__ or "").strip().partition("\n")[0].rstrip(".")
        if (suite, full_name) in CASES:
            raise ValueError(f"Two cases have one name. Received: name={full_name!r}. Rename one.")
        if not shown:
            raise ValueError(f"A case needs a docstring, its title. Received: name={full_name!r}.")
        chosen = replicas
        if replicas is None:
            more = REPLICAS[1:]
            number = zlib.crc32(full_name.encode())
            chosen = (REPLICAS[0], more[number % len(more)]) if more else REPLICAS
        elif _COUNT:
            chosen = tuple(one for one in replicas if one in REPLICAS)
        made = Case(full_name, topic, shown, function, replicas=tuple(chosen), **options)
        CASES[suite, full_name] = made
        return function

    return register


def load(suite: str = CONFORMANCE) -> dict[str, Case]:
    """All cases of a suite, by name, in the order of their modules."""
    package = importlib.import_module(suite)
    for module in pkgutil.iter_modules(package.__path__):
        if module.name.startswith("cases_"):
            importlib.import_module(f"{suite}.{module.name}")
    # The harness's own tests add cases that misbehave.
    for name in filter(None, os.environ.get(EXTRA_CASES, "").split(",")):
        importlib.import_module(name)
    return {name: one for (home, name), one in CASES.items() if home == suite}


def is_in_this_run(item: Item) -> bool:
    """Whether an item is not left to `make test-everything`, or in that run whether it is."""
    few = [count for count in item.case.replicas if count <= 2] or item.case.replicas[:1]
    is_left_out = item.replicas not in few
    if has_its_like(item.case, item.backend):
        return everything() and not is_left_out  # with more replicas in `make support` alone
    return is_left_out == everything()


def has_its_like(case: Case, backend: str) -> bool:
    """Whether another case runs in place of this one, but in `make test-everything`."""
    return bool(case.like) and backend != CHEAPEST


# Themes whose cases are many programs each, or start a process of their own.
_LARGE = ("calls", "generated", "layers", "lookups", "products", "step_logs")


def is_slow(case: Case, backend: str, suite: str) -> bool:
    return backend != CHEAPEST and case.name not in firsts(backend, suite)


@functools.cache
def firsts(backend: str, suite: str) -> frozenset[str]:
    """The names of the first case of each theme that runs on a backend."""
    found: dict[str, str] = {}
    for name, one in load(suite).items():
        theme = name.partition(".")[0]
        if backend in one.backends and not one.like and theme not in _LARGE:
            found.setdefault(theme, name)
    return frozenset(found.values())


def items(backend: str, suite: str = CONFORMANCE) -> Iterator[Item]:
    for one in load(suite).values():
        if backend in one.backends:
            for replicas in one.replicas:
                yield Item(one, backend, replicas)
