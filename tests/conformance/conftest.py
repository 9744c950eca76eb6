"""Items of a backend run in one fresh process each; the backends run beside each other."""

import pytest

from tests.conformance.runner import BackendRun


class Runs:
    """The selected items of this session, begun when the first of them is due."""

    def __init__(self, items):
        keys: dict[str, list[str]] = {}
        for item in items:
            params = item.callspec.params if hasattr(item, "callspec") else {}
            if "conformance_key" in params:
                keys.setdefault(params["backend"], []).append(params["conformance_key"])
        self._runs = {backend: BackendRun(backend, keys[backend]) for backend in keys}

    def result(self, backend: str, key: str):
        return self._runs[backend].result(key)

    def close(self):
        for run in self._runs.values():
            run.stop()
            run.save()


@pytest.fixture(scope="session")
def conformance_runs(request):
    runs = Runs(request.session.items)
    yield runs
    runs.close()
