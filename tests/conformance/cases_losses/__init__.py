"""What the loss is, and what it divides by (C1's numerics)."""

from tests.conformance.cases_losses import added, divisors, terms  # noqa: F401 (registers their cases)
