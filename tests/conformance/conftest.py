"""Items of a backend run in one fresh process each, started when the first of them is due."""

import pytest

from tests.conformance.runner import BackendRun


class Runs:
    def __init__(self, session: pytest.Session):
        self._session = session
        self._runs: dict[str, BackendRun] = {}

    def of(self, backend: str) -> BackendRun:
        if backend not in self._runs:
            keys = [
                item.callspec.params["key"]
                for item in self._session.items
                if isinstance(item, pytest.Function)
                and hasattr(item, "callspec")
                and item.callspec.params.get("backend") == backend
                and "key" in item.callspec.params
            ]
            self._runs[backend] = BackendRun(backend, keys)
        return self._runs[backend]

    def close(self):
        for run in self._runs.values():
            run.stop()
            run.save()


@pytest.fixture(scope="session")
def conformance_runs(request):
    runs = Runs(request.session)
    yield runs
    runs.close()
