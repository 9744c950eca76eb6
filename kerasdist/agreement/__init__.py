"""Checks that the workers of a job have equal models, calls, batches and results."""
