"""The Python blocks of README and docs run, page after page, in one process of each backend."""

import functools
import json

import pytest

from tests.docs.__main__ import EXAMPLES, MARK
from tests.docs.blocks import BACKENDS, all_blocks, examples
from tests.environment import CPU_DEVICES, path_of_users, values
from tests.fresh import run_python

BLOCKS = all_blocks()
RUNS = [
    *sorted({(backend, block.page) for block in BLOCKS for backend in block.backends}),
    *sorted({(backend, EXAMPLES) for block in examples() for backend in block.backends}),
]
SECONDS = 600  # of a process; many times what it takes alone

pytestmark = pytest.mark.timeout(3 * SECONDS)


@functools.cache
def results(backend):
    pages = [page for one, page in RUNS if one == backend]
    environment = {
        **values(CPU_DEVICES),
        "KERAS_BACKEND": backend,
        "KERASDIST_CPU_DEVICES": "2",
        "PYTHONPATH": path_of_users(),
    }
    output = run_python("-m", "tests.docs", *pages, seconds=SECONDS, **environment)
    lines = [line.removeprefix(MARK) for line in output.splitlines() if line.startswith(MARK)]
    return {result["page"]: result for result in map(json.loads, lines)}


def test_there_are_blocks():
    assert {backend for backend, _ in RUNS} == set(BACKENDS)
    assert len(RUNS) > 20


@pytest.mark.parametrize(("backend", "page"), RUNS)
def test_the_blocks_run(backend, page):
    result = results(backend)[page]
    assert result["blocks"] > 0
    assert result["error"] is None, result["error"]


def test_a_block_runs_or_says_why_not():
    for block in [*BLOCKS, *examples()]:
        if block.language == "python":
            runs = block.backends or block.with_keras_hub
            assert runs or len(block.marks["not run"]) > 10, block.place
            assert set(block.backends) <= set(BACKENDS), block.place
