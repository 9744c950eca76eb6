"""Groups of processes, one for each backend and layout; they run one after another."""

import pytest

from tests.conformance.runner import BackendRun, Result
from tests.multiprocess.layouts import limits


class Groups:
    """Each group begins when the first of its results is asked for."""

    def __init__(self, items):
        self._keys: dict[tuple[str, str], list[str]] = {}
        for item in items:
            params = item.callspec.params if hasattr(item, "callspec") else {}
            if "group_case" in params:
                group = params["backend"], params["layout"]
                self._keys.setdefault(group, []).append(params["group_case"])
        self._runs: dict[tuple[str, str], BackendRun] = {}

    def result(self, backend: str, layout: str, key: str) -> Result:
        group = backend, layout
        if group not in self._runs:
            self._runs[group] = BackendRun.of_group(backend, self._keys[group], layout, limits())
        return self._runs[group].result(key)

    def close(self):
        for run in self._runs.values():
            run.stop()
            run.save()


@pytest.fixture(scope="session")
def groups(request):
    opened = Groups(request.session.items)
    yield opened
    opened.close()
