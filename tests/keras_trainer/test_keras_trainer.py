"""What plain Keras passes of its own trainer tests, a model in a strategy's scope passes too."""

import pytest

from tests.keras_trainer import suite


@pytest.mark.slow
@pytest.mark.timeout(suite.SECONDS + 60)
@pytest.mark.parametrize("backend", suite.BACKENDS)
def test_passes_what_plain_keras_passes(backend):
    found = suite.compare(backend)
    if found.worse:
        told = "\n\n".join(f"{test}: {message}" for test, message in found.worse.items())
        pytest.fail(f"{len(found.worse)} tests are lost under the strategy:\n{told}", pytrace=False)
    assert not found.idle_exceptions, "these pass now: take them off the list of exceptions"
