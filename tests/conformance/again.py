"""Cases of the exactness suite and of the facade's, which other suites run once more."""

import os
from collections.abc import Mapping, Set
from dataclasses import replace

from tests.conformance import registry
from tests.facade.case import OWN


def register(
    suite: str,
    variable: str,
    selected: Mapping[str, Set[str]],
    backends: tuple[str, ...] = registry.BACKENDS,
    left_out: Set[str] = frozenset(),
) -> None:
    """Registers cases for each way in which the suite runs them, with which their names begin.

    With ``variable=all`` all that concern every backend, but for ``left_out``; else ``selected``.
    """
    everything = os.environ.get(variable) == "all"
    facade = {f"facade.{name}": case for name, case in registry.load("tests.facade").items()}
    known = {**registry.load(), **facade}
    for name, case in known.items():
        for way, names in selected.items():
            if name in names or (everything and case.topic != OWN and name not in left_out):
                again = f"{way}.{name}".removeprefix(".")
                registry.CASES[suite, again] = replace(
                    case,
                    name=again,
                    backends=tuple(one for one in case.backends if one in backends),
                    replicas=case.replicas if everything else case.replicas[:1],
                )
    if missing := set(left_out).union(*selected.values()) - known.keys():
        raise ValueError(f"Expected names of cases. Received: {sorted(missing)}. Rename them here.")
