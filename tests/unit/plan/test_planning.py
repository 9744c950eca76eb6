"""The search for the largest batch, with a compiler that is a formula."""

import pytest

from kerasdist.errors import InputError
from kerasdist.plan import planning
from kerasdist.plan.planning import Compilation, Subject, examples_of, fits, make_plan
from kerasdist.plan.prediction import Work
from kerasdist.plan.targets import parse_target


def compiler(constant, each, refuses_above=None):
    tried = []

    def compile_step(target, examples):
        tried.append((str(target), examples))
        needed = constant + each * examples
        refused = refuses_above is not None and needed > refuses_above
        memory = {"parameters": 0 if refused else int(needed)}
        return Compilation(
            batch=examples,
            memory=memory,
            work=Work({"bfloat16": 1e9 * examples}, 1e6),
            collectives=[],
            refused="RESOURCE_EXHAUSTED" if refused else None,
            refused_bytes=needed if refused else 0.0,
        )

    return compile_step, tried


def largest(target, compile_step, start):
    return planning.largest_batch(compile_step(target, start), target, compile_step) or 0


@pytest.mark.parametrize("start", [1, 16, 2000, 30_000])
@pytest.mark.parametrize("text", ["8xh100", "v5e:4x4"])
def test_the_largest_batch_is_close_to_the_limit_and_was_compiled(text, start):
    target = parse_target(text)
    limit = planning.usable_bytes(target)
    refuses_above = limit if "v5e" in text else None
    compile_step, tried = compiler(1e9, 4e6, refuses_above)
    found = largest(target, compile_step, start)
    assert 0.95 * limit <= 1e9 + 4e6 * found <= limit
    assert found in [examples for _, examples in tried]
    assert len(tried) <= 6


def test_memory_that_does_not_grow_at_first_is_no_obstacle():
    compile_step, _ = compiler(0, 0)
    target = parse_target("8xh100")
    assert largest(target, compile_step, 1) >= 64


def test_where_nothing_fits():
    compile_step, _ = compiler(200e9, 1e6)
    assert largest(parse_target("8xh100"), compile_step, 4) == 0


def test_a_large_target_is_searched_on_a_small_one():
    compile_step, tried = compiler(1e9, 4e6)
    largest(parse_target("v5p:16x16x16"), compile_step, 64)
    assert {name for name, _ in tried[1:]} == {"v5p:1x2x2"}


def test_a_plan_of_one_device_asks_several_what_they_exchange():
    compile_step, tried = compiler(1e9, 4e6)
    plan = make_plan(Subject("x.py", None, 1), 8, parse_target("h100"), compile_step, largest=False)
    assert tried == [("1xh100", 8), ("2xh100", 8)]
    assert plan.fits
    assert plan.largest_batch is None


def test_what_does_not_fit():
    compile_step, _ = compiler(100e9, 0)
    target = parse_target("h100")
    assert not fits(compile_step(target, 1), target)


def test_examples_of_a_device():
    target = parse_target("8xh100")
    assert examples_of(256, target, None) == 32
    assert examples_of(4, target, 5) == 5
    with pytest.raises(InputError, match=r"at least 8 examples.*Received: 7.*--batch-per-device"):
        examples_of(7, target, None)
