"""Cases on several workers, each a process: what every worker gets equals what one device gets."""

import pytest

from tests.conformance.items import marks, require
from tests.conformance.registry import BACKENDS
from tests.multiprocess.layouts import cases, is_slow, layouts, selected

ITEMS = [
    pytest.param(
        *(backend, str(layout), key),
        id=f"{backend}-{layout}-{key}",
        marks=marks(cases()[key], slow=is_slow(backend, layout, key)),
    )
    for backend in BACKENDS
    for layout in layouts(backend)
    for key in selected(backend, layout)
]


@pytest.mark.parametrize(("backend", "layout", "group_case"), ITEMS)
def test_equals_one_device(backend, layout, group_case, groups):
    require(groups.result(backend, layout, group_case))
