"""Runs that are interrupted and started again: to the last bit those that nothing interrupted."""

from tests.conformance.cases_restarts import folders, runs, sources  # noqa: F401 (their cases)
