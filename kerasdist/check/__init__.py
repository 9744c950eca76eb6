"""A training step on one device and under the strategy, on copies of the state (ADR 52)."""
