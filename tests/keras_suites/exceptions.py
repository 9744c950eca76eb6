"""Tests that need not pass under a strategy: backend, the beginning of their names, the reason."""

_BEFORE_THE_SCOPE = (
    "its `setUp` makes the model, before the suite opens the scope around the test: a model made "
    "outside of the scope is refused in it"
)
_PLATEAU = "callbacks/reduce_lr_on_plateau_test.py::ReduceLROnPlateauTest::"

EXCEPTIONS: dict[str, dict[str, str]] = {
    "tensorflow": {_PLATEAU: _BEFORE_THE_SCOPE},
    "jax": {_PLATEAU: _BEFORE_THE_SCOPE},
    "torch": {_PLATEAU: _BEFORE_THE_SCOPE},
}


def reason(backend: str, test: str) -> str | None:
    """Returns why a test need not pass, None if it must."""
    reasons = EXCEPTIONS.get(backend, {}).items()
    return next((why for begin, why in reasons if test.startswith(begin)), None)
