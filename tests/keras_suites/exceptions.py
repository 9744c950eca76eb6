"""Tests that need not pass under a strategy: backend, the beginning of their names, the reason."""

EXCEPTIONS: dict[str, dict[str, str]] = {
    "tensorflow": {},
    "jax": {},
    "torch": {},
}


def reason(backend: str, test: str) -> str | None:
    """Returns why a test need not pass, None if it must."""
    reasons = EXCEPTIONS.get(backend, {}).items()
    return next((why for begin, why in reasons if test.startswith(begin)), None)
