"""What plain Keras passes of its own tests, it passes in a strategy's scope, too."""

import pytest

from tests.keras_suites import suite
from tests.keras_suites.outcomes import Comparison, Outcome


@pytest.mark.slow
@pytest.mark.timeout(suite.SECONDS + 60)
@pytest.mark.parametrize("backend", suite.BACKENDS)
def test_passes_what_plain_keras_passes(backend):
    found = suite.compare(backend, suite.SELECTION, suite.HALVES.get(backend))
    if found.worse:
        told = "\n\n".join(f"{test}: {message}" for test, message in found.worse.items())
        pytest.fail(f"{len(found.worse)} tests are lost under the strategy:\n{told}", pytrace=False)
    assert not found.idle_exceptions, "these pass now: take them off the list of exceptions"


def test_a_failure_is_worse_only_where_plain_keras_passes():
    passed, failed, died = map(Outcome, ("passed", "failed", "died"))
    ours = {"a.py::one": failed, "a.py::two": died, "a.py::three": passed, "b.py::(import)": failed}
    plain = {"a.py::one": passed, "a.py::two": failed, "a.py::one_more": failed}
    found = Comparison("jax", ours, plain)
    assert list(found.worse) == ["a.py::one", "b.py::(import)"]
    assert found.counts() == [3, 0, 1, 1, 0, 3]
