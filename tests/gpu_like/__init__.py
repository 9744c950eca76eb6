"""Replicas on CPU devices that behave as if each had an accelerator, as far as a CPU can."""
