"""What workers compare, and how a message names the ones that differ."""

import pytest

from kerasdist.job.comparison import described_difference, digest, named_places


def test_the_order_of_names_does_not_matter():
    assert digest({"a": 1, "b": [1, None]}) == digest({"b": [1, None], "a": 1})
    assert digest({"a": 1}) != digest({"a": 1.5})
    assert digest([1, 2]) != digest([2, 1])


RELU, TANH = ([{"class": "Input"}, {"class": "Dense", "by": one}] for one in ("relu", "tanh"))


@pytest.mark.parametrize(
    ("everyone", "said"),
    [
        # The path and both values.
        ([{"n": RELU}, {"n": TANH}], "n[1].by='tanh' on worker 1, 'relu' on worker 0"),
        # Of three workers the odd one comes first; all groups.
        ([{"n": 0.5}, {"n": 0.1}, {"n": 0.1}], "n=0.5 on worker 0, 0.1 on workers 1, 2"),
        (
            [{"n": 1}, {"n": 2}, {"n": 2}, {"n": 3}],
            "n=1 on worker 0, 3 on worker 3, 2 on workers 1, 2",
        ),
        ([{"n": 1}, {"n": 1, "steps": 4}], "steps=4 on worker 1, nothing on worker 0"),
        # For further differences only their names are shown.
        (
            [{"a": 1, "b": 2, "c": 3}, {"a": 0, "b": 2, "c": 4}],
            "a=0 on worker 1, 1 on worker 0 (further differences: c)",
        ),
        # Of many workers eight, and the number of the others.
        (
            [{"n": int(rank == 9)} for rank in range(4096)],
            "n=1 on worker 9, 0 on workers 0, 1, 2, 3, 4, 5, 6, 7 and 4087 others",
        ),
    ],
)
def test_what_differs_is_named(everyone, said):
    assert described_difference(everyone) == said


def test_much_that_differs_is_cut():
    assert len(described_difference([{"a": "x" * 1000}, {"a": "y"}])) < 400
    said = described_difference([{"n": rank} for rank in range(4096)])
    assert said.startswith("n=1 on worker 1, 2 on worker 2, ")
    assert said.endswith("8 on worker 8, 0 on worker 0, other values on 4087 more")


def test_one_worker_can_speak_for_those_that_agree_with_it():
    groups = [[0, 3], [1, 2, 4], [5]]
    said = described_difference([{"n": 1}, {"n": 2}], groups)
    assert said == "n=1 on workers 0, 3, 2 on workers 1, 2, 4, other values on 1 more"


def test_places_of_many_workers():
    said = named_places({1: "at 'b'", 0: "at 'a'", 2: "at 'a'"})
    assert said == "workers 0, 2 are at 'a'; worker 1 is at 'b'"
    said = named_places({rank: f"at step {rank}" for rank in range(4096)})
    assert said.endswith("worker 7 is at step 7; 4088 others are elsewhere")
