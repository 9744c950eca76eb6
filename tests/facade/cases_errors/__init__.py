"""Errors: their type, what they say, and that the strategy goes on."""

from tests.facade.cases_errors import arguments, replicas  # noqa: F401 (registers their cases)
