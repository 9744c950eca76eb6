"""Cases that misbehave, for the harness's own tests; no part of the suite."""

import os
import time

from tests.conformance.registry import case


def probe(function):
    return case("probes", replicas=(2,), seconds=3.0)(function)


@probe
def good(lab):
    """Passes."""
    lab.equal(1.0, 1.0 + 1e-7)


@probe
def wrong(lab):
    """Compares unequal numbers."""
    lab.equal({"loss": [1.0, 2.0]}, {"loss": [1.0, 2.1]})


@probe
def hangs(lab):
    """Takes longer than its limit."""
    time.sleep(60)


@probe
def crashes(lab):
    """Ends the process."""
    os._exit(7)


@probe
def after(lab):
    """Runs in a new process after the one that crashed."""


@case("probes", replicas=(2,), refused={"torch": ("ValueError", "not here")})
def refused(lab):
    """Is refused as declared."""
    raise ValueError("This is not here.")


@case("probes", replicas=(2,), refused={"torch": ("ValueError", "not here")})
def refused_otherwise(lab):
    """Is refused with another error than declared."""
    raise TypeError("This is not here.")
