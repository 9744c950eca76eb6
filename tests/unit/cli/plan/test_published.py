"""The formulas against scaling that others have published."""

import pytest

from kerasdist.core.hardware import parse_target
from tests.unit.cli.plan import published
from tests.unit.cli.plan.published import POINTS

USUAL = 0.08
# Programs that lose to something else than the network that the plan knows: docs/guides/plan.md.
SLOW = {
    "BERT-base, 32, TF 1 and Horovod": 0.29,
    "BERT-base, 32, MXNet and Horovod": 0.37,
    "ResNet-50, mixed, PyTorch": 0.16,
    "BERT-Large, 60 x 4, TF 2 and Horovod": 0.21,
    "BERT-Large, 60 x 2, TF 2 and Horovod": 0.17,
    "EfficientNetV2-S, 460 of 300 x 300, mixed, TF 2 and Horovod": 0.19,
    "16 billion, 6 x 2,048 tokens, slices of 256, MaxText": 0.10,
    "128 billion, 2,048 tokens, slices of 256, MaxText": 0.10,
}


@pytest.mark.parametrize("point", POINTS, ids=lambda point: point.what)
def test_a_measurement_is_near_what_is_planned(point):
    for name, reached in point.reached.items():
        low, high = point.without_overlap(name), point.with_overlap(name)
        assert 0 < low <= high <= 1
        assert low - SLOW.get(point.what, USUAL) <= reached <= high + USUAL


def test_the_programs_that_are_named_are_slow():
    slow = {one.what for one in POINTS if min(map(one.error, one.reached)) < -USUAL}
    assert slow == set(SLOW)


def test_a_part_of_the_network_is_said():
    sources = parse_target("2x8xv100").with_network(0.25).chip.sources
    assert sources[-1] == "network: 25% of its rate, as --network-efficiency says"


def test_the_page_has_the_table():
    """`python -m tests.unit.cli.plan.published` writes it."""
    assert published.in_page(published.PAGE.read_text("utf-8")) == published.table()
