"""Keras's nightly of the day: red where kerasdist has broken, loud where Keras has.

CI runs this, and says at its end which nightly it was. `make nightly` is the same without mercy.
"""

import warnings

import pytest

from tests.versions import nightly
from tests.versions.conftest import SAID
from tests.versions.selection import BACKENDS


@pytest.fixture(scope="module")
def today():
    return nightly.of_today()


@pytest.fixture(scope="module")
def findings():
    return []


@pytest.mark.filterwarnings("default:Keras's nightly")
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_selection_passes_or_keras_has_broken_it(backend, today, findings):
    found = nightly.judged(backend, today)
    findings.append(found)
    nightly.write(findings)
    SAID.append(found.text if found.failed else found.line)
    if found.failed and not found.ours:
        warnings.warn(f"Keras's nightly has broken kerasdist: {found.line}", stacklevel=1)
    assert not found.ours, found.text
