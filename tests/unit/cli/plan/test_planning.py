"""The search for the largest batch, with a compiler that is a formula."""

import math

import pytest

from kerasdist.cli.plan import planning
from kerasdist.cli.plan.planning import Compilation, Subject, Work, examples_of, make_plan
from kerasdist.core.hardware import parse_target
from kerasdist.errors import InputError


def compiler(constant, each, refuses_above=None, hidden=0.0, is_told=True):
    """Memory is a straight line; `hidden` is the part of its constant that is not in the state."""
    tried = []

    def compile_step(target, examples):
        tried.append((str(target), examples))
        needed = constant + hidden + each * examples
        refused = refuses_above is not None and needed > refuses_above
        activations = 0 if refused else int(needed - constant)
        return Compilation(
            batch=examples,
            memory={"parameters": int(constant), "activations and temporaries": activations},
            work=Work({"bfloat16": 1e9 * examples}, 1e6),
            collectives=[],
            refused="RESOURCE_EXHAUSTED" if refused else None,
            refused_bytes=needed if refused and is_told else 0.0,
        )

    return compile_step, tried


def largest(target, compile_step, start, most=math.inf):
    return planning.largest_batch(compile_step(target, start), target, compile_step, most)


@pytest.mark.parametrize("start", [1, 16, 2000, 30_000])
@pytest.mark.parametrize("text", ["8xh100", "v5e:4x4"])
@pytest.mark.parametrize("hidden", [0, 1e9])
def test_the_largest_batch_is_close_to_the_limit_and_was_compiled(text, start, hidden):
    target = parse_target(text)
    limit = target.usable
    refuses_above = limit if "v5e" in text else None
    compile_step, tried = compiler(1e9, 4e6, refuses_above, hidden)
    found = largest(target, compile_step, start)
    assert 0.97 * limit <= 1e9 + hidden + 4e6 * found.examples <= limit
    assert found.limit == "memory"
    assert (text, found.examples) in tried
    assert len(tried) <= 3


def test_the_data_end_the_search_before_the_memory_does():
    compile_step, tried = compiler(1e9, 4e6)
    found = largest(parse_target("8xh100"), compile_step, 4, most=168)
    assert (found.examples, found.limit) == (168, "data")
    assert tried == [("8xh100", 4), ("8xh100", 168)]
    limit = parse_target("8xh100").usable
    assert found.room == pytest.approx((limit - 1e9) / 4e6, rel=1e-3)


def test_no_batch_beyond_the_data_is_compiled():
    compile_step, tried = compiler(1e9, 4e6)
    found = largest(parse_target("8xh100"), compile_step, 32, most=1)
    assert (found.examples, found.limit, found.room) == (32, "data", None)
    assert len(tried) == 1


def test_memory_that_does_not_grow_ends_the_search_too():
    compile_step, tried = compiler(0, 0)
    found = largest(parse_target("8xh100"), compile_step, 1)
    assert found.limit == "search"
    assert found.examples == tried[-1][1] >= 64
    assert len(tried) == 4


@pytest.mark.parametrize(
    ("constant", "each", "attempts"), [(200e9, 1e6, [4]), (1e9, 200e9, [4, 1])]
)
def test_where_nothing_or_no_example_fits(constant, each, attempts):
    compile_step, tried = compiler(constant, each)
    assert largest(parse_target("8xh100"), compile_step, 4) is None
    assert [examples for _, examples in tried] == attempts


def test_a_refusal_without_a_size_halves():
    compile_step, tried = compiler(1e9, 4e9, refuses_above=16e9, is_told=False)
    found = largest(parse_target("v5e:4x4"), compile_step, 12)
    assert (found.examples, found.limit) == (3, "search")
    assert [examples for _, examples in tried] == [12, 6, 3, 5]


def test_a_plan_of_one_device_asks_several_what_they_exchange():
    compile_step, tried = compiler(1e9, 4e6)
    plan = make_plan(Subject("x.py", None, 1), 8, parse_target("h100"), compile_step, largest=False)
    assert tried == [("1xh100", 8), ("2xh100", 8)]
    assert plan.fits
    assert plan.largest_batch is None


def test_what_the_host_holds_comes_over_its_own_way():
    target = parse_target("8xh100")
    step = planning.step_time(Work({"bfloat16": 1e9}, 1e6, host_bytes=63e9), [], target)
    assert (step.host, step.own, step.limit) == (1.0, 1.0, "host")
    busy = planning.step_time(Work({"bfloat16": 2e15}, 1e6, host_bytes=63e9), [], target)
    assert (busy.host, busy.limit) == (1.0, "compute")
    assert busy.own == busy.compute > 2


def test_examples_of_a_device():
    target = parse_target("8xh100")
    assert examples_of(256, target, None) == 32
    assert examples_of(4, target, 5) == 5
    with pytest.raises(InputError, match=r"at least 8 examples.*Received: 7.*--batch-per-device"):
        examples_of(7, target, None)
