"""Cases on several workers, each a process: what every worker gets equals what one device gets.

Of the conformance cases each backend runs a part on two workers, chosen by name;
``KERASDIST_MULTIPROCESS_FULL=1`` runs all of them, and on more layouts.
"""

import pytest

from tests.conformance.registry import BACKENDS
from tests.conformance.runner import GRACE_SECONDS, STARTUP_SECONDS
from tests.multiprocess.layouts import cases, layouts, selected

ITEMS = [
    pytest.param(
        backend,
        str(layout),
        key,
        id=f"{backend}-{layout}-{key}",
        # The worker has the case's own limit; this one is for a group that says nothing.
        marks=pytest.mark.timeout(STARTUP_SECONDS + cases()[key].seconds + 4 * GRACE_SECONDS),
    )
    for backend in BACKENDS
    for layout in layouts(backend)
    for key in selected(backend, layout)
]


@pytest.mark.parametrize(("backend", "layout", "group_case"), ITEMS)
def test_equals_one_device(backend, layout, group_case, groups):
    result = groups.result(backend, layout, group_case)
    if not result.good:
        pytest.fail(
            f"{result.status} after {result.seconds} s: {result.message}\n{result.traceback}",
            pytrace=False,
        )
