"""Ranks of jobs of 64 to 4,096 workers on PyTorch, one at a time: see `torch_ranks`.

What is counted are collectives, bytes and lines of code that run, never seconds.
"""

import json
import math
from functools import cache

import pytest

from tests.environment import everything
from tests.fresh import run_forked

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

RANKS = (64, 512, 4096) if everything() else (64, 4096)
STATES = ("full", "optimizer", "replicated") if everything() else ("full",)
EACH = [(ranks, state) for ranks in RANKS for state in STATES]


@pytest.fixture(scope="module")
def of():
    """What the first and the last rank of a job do, in `make test-everything` one between too."""

    @cache
    def lines(ranks):
        code = f"from tests.unit.backends.torch_ranks import main; main({ranks}, {STATES})"
        output = run_forked(code, "torch")
        return [json.loads(line) for line in output.splitlines() if line.startswith("{")]

    def found(ranks, state):
        return [one for one in lines(ranks) if one["state"] == state]

    return found


def operations(facts):
    return [name for name, _ in facts["collectives"]]


@pytest.mark.parametrize(("ranks", "state"), EACH)
def test_all_ranks_start_the_same_collectives_in_one_order(of, ranks, state):
    first, *others = of(ranks, state)
    assert len(first["collectives"]) >= 4
    assert all(one["collectives"] == first["collectives"] for one in others)
    # As many as in a job of another size.
    assert operations(first) == operations(of(RANKS[0], state)[0])


@pytest.mark.parametrize("state", STATES)
def test_no_line_of_a_step_runs_more_often_with_more_ranks(of, state):
    counts = {ranks: [one["lines of 3 steps"] for one in of(ranks, state)] for ranks in RANKS}
    assert all(one == counts[RANKS[0]] for one in counts.values()), counts
    assert min(counts[RANKS[0]]) > 1000


@pytest.mark.parametrize(("ranks", "state"), EACH)
def test_a_rank_holds_its_shards_and_no_more(of, ranks, state):
    for one in of(ranks, state):
        expected = most = 0
        for number, (shape, itemsize) in enumerate(
            zip(one["shapes"], one["itemsizes"], strict=True)
        ):
            size = math.prod(shape)
            held = one["shards"].get(str(number), [[0, size]])
            expected += itemsize * sum(end - begin for begin, end in held)
            is_sharded = str(number) in one["shards"]
            most += itemsize * (math.ceil(size / ranks) if is_sharded else size)
        assert one["bytes"] == expected <= most
        # Two kernels and three more vectors, and Adam's two slots of each; or these slots alone.
        assert len(one["shards"]) == {"full": 15, "optimizer": 10, "replicated": 0}[state]
