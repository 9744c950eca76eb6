"""The formulas, where the answer is known."""

import pytest

from kerasdist.cli.plan.hlo import Collective
from kerasdist.cli.plan.planning import Work, collective_time, scaling, step_time
from kerasdist.core.hardware import CHIPS, group_of, parse_target

NOTHING = Work({}, 0.0)


def total(size, overlap=0.0):
    return Collective("all-reduce", int(size), 0, overlap)


@pytest.mark.parametrize(
    ("size", "target", "seconds", "rel"),
    [
        (1e9, "h100", 0, 0),
        # In a machine an H100 sends 7/8 of the array twice, by its links.
        (8e9, "8xh100", 2 * 7e9 / 370e9, 1e-3),
        # Between machines each GPU sends its part.
        (8e9, "2x8xh100", max(2 * 1e9 / 2 / 50e9, 2 * 7e9 / 370e9), 1e-2),
        (8e9, "512x8xh100", 2 * 1e9 / 50e9, 1e-2),
        # Its maker states 51.2 TB/s for 256 chips, each of which sends the array about twice.
        (8e9, "v5e:16x16", 2 * 8e9 * 256 / 51.2e12, 1e-2),
        # A small sum takes the latency: in a torus that of half of each closed axis.
        (4, "8xh100", 4.4e-6 + 2 * 7 * 0.52e-6, 1e-3),
        (4, "v5p:2x2x2", 2 * 3e-6, 1e-2),
        (4, "v5p:8x8x16", 2 * 16e-6, 1e-2),
    ],
)
def test_how_long_a_sum_takes(size, target, seconds, rel):
    assert collective_time(total(size), parse_target(target)) == pytest.approx(seconds, rel=rel)


class TestCollectives:
    def test_a_part_of_a_torus_that_is_not_closed_has_half_of_the_rate(self):
        pod, part = (collective_time(total(1e12), parse_target(f"v5e:{n}x{n}")) for n in (16, 4))
        assert part / pod == pytest.approx(2 * (15 / 16) / (255 / 256), rel=1e-3)

    def test_the_latency_of_a_small_sum_grows_with_the_machines(self):
        few, many = (collective_time(total(4), group_of(CHIPS["h100"], n)) for n in (64, 512))
        assert many - few == pytest.approx(2 * 3 * 5e-6, rel=1e-3)

    def test_gathering_is_one_pass_and_summing_two(self):
        target = parse_target("8xh100")
        gather = Collective("all-gather", 8 * 10**9, 0, 0.0)
        ratio = collective_time(total(8e9), target) / collective_time(gather, target)
        assert ratio == pytest.approx(2, rel=1e-3)

    def test_logical_devices_stay_in_their_machine(self):
        pairs = Collective("all-gather", 10**9, 2, 0.0)
        times = {collective_time(pairs, group_of(CHIPS["h100"], n)) for n in (8, 64, 4096)}
        assert len(times) == 1


class TestSteps:
    def test_a_roofline(self):
        target = parse_target("h100")
        by_units = step_time(Work({"bfloat16": 989.4e12}, 1.0), [], target)
        assert by_units.total == pytest.approx(1.0)
        assert by_units.limit == "compute"
        by_memory = step_time(Work({"float32": 1.0}, 3352e9), [], target)
        assert by_memory.total == pytest.approx(1.0)
        assert by_memory.limit == "memory"

    def test_xlas_estimate_counts_where_it_is_longer(self):
        cycles = 197e12 / (4 * 2 * 128**2)  # a second, as four units of 128 x 128 make 197 TFLOP/s
        step = step_time(Work({"bfloat16": 197e11}, 1.0, cycles), [], parse_target("v5e:1x1"))
        assert step.total == pytest.approx(1.0)
        assert step.limit == "instructions"
        assert step_time(Work({}, 1.0, cycles), [], parse_target("v6e:1x1")).estimate == 0

    def test_what_overlaps_is_hidden_and_no_more(self):
        target = parse_target("8xh100")
        network = collective_time(total(8e9), target)
        work = Work({"bfloat16": 989.4e12 * 2 * network}, 0.0)
        half = step_time(work, [total(8e9, overlap=0.25)], target)
        assert half.exposed == pytest.approx(network / 2)
        whole = step_time(work, [total(8e9, overlap=0.9)], target)
        assert whole.exposed == 0
        assert whole.efficiency == 1
        assert whole.efficiency_without_overlap == pytest.approx(2 / 3)
        assert step_time(NOTHING, [total(8e9, 0.9)], target).limit == "network"

    def test_efficiency_falls_with_the_devices_and_is_1_for_one(self):
        for name in CHIPS:
            steps = scaling(Work({"bfloat16": 1e12}, 1e9), [total(1e8)], group_of(CHIPS[name], 8))
            assert [each.devices for each in steps] == [1, 8, 64, 512, 4096]
            assert steps[0].efficiency == 1
            parts = [each.efficiency for each in steps]
            # Among TPUs a group may have links that a smaller one has not: its torus is closed.
            assert CHIPS[name].axes or parts == sorted(parts, reverse=True)
