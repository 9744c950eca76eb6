"""Compares a training step on one device with the same step under the strategy (ADR 52)."""
