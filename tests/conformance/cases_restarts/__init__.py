"""Runs that are interrupted and started again: to the last bit those that nothing interrupted."""

from tests.conformance.cases_restarts import (  # noqa: F401 (registers their cases)
    folders,
    runs,
    sources,
    timed,
)
