"""Tests of Keras that assert how Keras does it, not what it computes: backend, test, reason."""

EXCEPTIONS: dict[str, dict[str, str]] = {"tensorflow": {}, "jax": {}, "torch": {}}
