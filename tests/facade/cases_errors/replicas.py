"""Errors of calls that replicas or their values take part in."""

from functools import partial

import numpy as np

from tests.conformance.lazy import kd, ops
from tests.facade.case import case
from tests.facade.cases_collectives import here
from tests.facade.lab import numbered, variable_of


class Own(Exception):
    """An error of the user's."""


def shaped(strategy, shapes):
    return numbered(strategy, lambda i: np.ones(shapes[i], "float32"))


def refused(lab, strategy, kinds, pattern, *calls):
    """Each call ends in such an error, and the strategy goes on."""
    for call in calls:
        with lab.raises(kinds, pattern):
            call()
        lab.still_usable(strategy)


@case(replicas=(1, 2))
def args_that_are_no_tuple(lab, strategy):
    """`run` refuses `args` that is not a tuple or list, such as one tensor."""
    said = r"Expected args to be a tuple or list.*Received: args=.*\(x,\)"
    for args in (ops.ones(2), shaped(strategy, [(2,), (2,)]), {"x": 1}, "text", 3):
        refused(lab, strategy, ValueError, said, partial(strategy.run, here, args=args))


@case
def reduce_gather_and_more_in_a_replica(lab, strategy):
    """Methods for cross-replica code, called in a replica, say what to call there."""
    variable = variable_of(strategy, 1.0)
    extended = strategy.extended
    calls = {
        "all_reduce": lambda x: strategy.reduce("SUM", x, axis=None),
        "all_gather": lambda x: strategy.gather(x, axis=0),
        "call the function directly": lambda x: strategy.run(lambda: x),
        "the dataset itself": lambda x: strategy.distribute_dataset([x]),
        "dataset_from_function|datasets_from_function": lambda x: (
            strategy.distribute_datasets_from_function(lambda _: [x])
        ),
        "the value itself": lambda x: strategy.distribute_values_from_function(lambda _: x),
        r"get_replica_context\(\)\.all_reduce": lambda x: extended.reduce_to("SUM", x, variable),
        r"get_replica_context\(\)\.merge_call": lambda x: extended.update(
            variable, lambda v: v.assign(x)
        ),
        "broadcast_to.*merge_call": lambda x: extended.broadcast_to(x, variable),
    }
    for instead, call in calls.items():
        pattern = f"(?=.*Expected strategy.*cross-replica context.*Received: a call in).*{instead}"
        given = partial(strategy.run, call, args=(ops.ones(2),))
        refused(lab, strategy, RuntimeError, pattern, given)


@case
def scopes_that_do_not_fit(lab):
    """A scope may not be opened in another strategy's scope or in a replica."""
    first, second = lab.strategy(), lab.strategy(3)
    default = kd.get_strategy()
    with default.scope(), first.scope(), first.scope():
        pattern = "Expected one strategy at a time.*Received"
        for other in (second, default):
            with lab.raises(kd.errors.ScopeError, pattern), other.scope():
                pass
        with lab.raises(kd.errors.ScopeError, pattern):
            second.run(lambda: 1.0)
        lab.check(kd.get_strategy() is first, "the first stays")
    lab.check(not kd.has_strategy(), "the first scope is left")
    for strategy in (first, default, kd.OneDeviceStrategy("cpu:0")):
        kept = strategy.scope()  # entered again, and inside of itself
        for _ in range(2):
            with kept as outer, kept as inner:
                lab.check(outer is inner is kd.get_strategy() is strategy, "the strategy's own")
            lab.check(not kd.has_strategy(), "both are left")
    kept = first.extended.colocate_vars_with(variable_of(first, 1.0))
    with kept, kept:
        lab.check(kd.get_strategy() is first, "as in its scope")
    lab.check(not kd.has_strategy(), "both are left")

    def step():
        with first.scope():
            pass

    with lab.raises(kd.errors.ScopeError, r"Expected strategy.scope\(\) in cross-replica.*Receiv"):
        first.run(step)
    lab.still_usable(first)
    lab.still_usable(second)


@case
def values_of_another_number_of_replicas(lab):
    """A strategy of 2 replicas refuses values with 3 components."""
    strategy, other = lab.strategy(), lab.strategy(3)
    value = shaped(other, [(2,)] * 3)
    variable = variable_of(strategy, 1.0)
    calls = [
        lambda: strategy.run(lambda x: x, args=(value,)),
        lambda: strategy.run(lambda n: n["x"], kwargs={"n": {"x": value}}),
        lambda: strategy.reduce("SUM", value, axis=None),
        lambda: strategy.gather(value, axis=0),
        lambda: strategy.extended.reduce_to("SUM", value, variable),
        lambda: strategy.extended.update(variable, lambda v, x: None, args=(value,)),
    ]
    refused(lab, strategy, ValueError, "Expected.*2.*Received.*3", *calls)
    single = kd.OneDeviceStrategy("cpu:0")
    calls = [
        lambda: single.run(lambda x: x, args=({"x": [value]},)),
        lambda: single.reduce("SUM", value, axis=None),
        lambda: single.gather(value, axis=0),
        lambda: single.extended.reduce_to("SUM", value, value),
    ]
    refused(lab, single, ValueError, "Expected.*1.*Received.*3", *calls)


@case
def variables_of_another_strategy(lab):
    """A strategy of 2 replicas refuses to update variables of one with 3 replicas."""
    strategy, other = lab.strategy(), lab.strategy(3)
    variable = variable_of(other, 1.0, aggregation="mean")
    calls = [
        lambda: strategy.extended.update(variable, lambda v: v.assign(2.0)),
        lambda: strategy.run(lambda: variable.assign(2.0) is None),
    ]
    refused(lab, strategy, (ValueError, RuntimeError), "Expected.*scope.*Received", *calls)
    lab.equal([1.0] * 3, lab.components(variable, other))
    lab.still_usable(other)


@case
def shapes_that_do_not_match(lab, strategy):
    """`reduce`, `gather` and collectives refuse components of different shapes."""
    ragged = shaped(strategy, [(2, 2), (3, 3)])
    calls = [
        lambda: strategy.reduce("SUM", ragged, axis=None),
        lambda: strategy.extended.reduce_to("SUM", ragged, ragged),
        lambda: strategy.gather(ragged, axis=0),
    ]
    said = r"Expected.*shape.*Received: shapes=\[\(2"
    refused(lab, strategy, kd.errors.ShapeError, said, *calls)
    for step in (lambda x: here().all_reduce("SUM", x), lambda x: here().all_gather(x, axis=0)):
        call, said = partial(strategy.run, step, args=(ragged,)), "Expected.*shape|Expected.*same"
        refused(lab, strategy, (ValueError, RuntimeError), said, call)


@case(replicas=(1, 2))
def an_axis_out_of_range(lab, strategy):
    """`reduce`, `gather` and `all_gather` refuse an axis that is out of range."""
    value = shaped(strategy, [(2,), (2,)])
    scalars = shaped(strategy, [(), ()])
    calls = [
        lambda: strategy.reduce("SUM", value, axis=1),
        lambda: strategy.reduce("MEAN", value, axis=-2),
        lambda: strategy.gather(value, axis=1),
        lambda: strategy.gather(scalars, axis=0),
    ]
    for shape, axis in (((), 0), ((2,), 1), ((2,), -2)):
        step = lambda s=shape, a=axis: here().all_gather(ops.ones(s), axis=a)  # noqa: E731
        calls.append(lambda step=step: strategy.run(step))
    refused(lab, strategy, ValueError, "Expected axis.*Received: axis=", *calls)


@case(replicas=(1, 2))
def an_axis_that_is_no_integer(lab, strategy):
    """An axis must be an integer; only `reduce` takes several axes."""
    value = numbered(strategy, lambda i: np.ones((2, 3), "float32"))
    calls = [
        call
        for axis in ([0, 1], 1.0, "0")
        for call in (
            partial(strategy.reduce, "SUM", value, axis=["0"] if axis == [0, 1] else axis),
            partial(strategy.gather, value, axis=axis),
            lambda axis=axis: strategy.run(lambda: here().all_gather(ops.ones((2,)), axis=axis)),
        )
    ]
    refused(lab, strategy, TypeError, "Expected axis to be an integer. Received: axis=", *calls)
    calls = [partial(strategy.reduce, "MEAN", value, axis=axis) for axis in ([], (0, 0), [1, -1])]
    refused(lab, strategy, ValueError, "Expected axis to be an axis, or several.*Received", *calls)


@case
def an_unknown_reduction(lab, strategy):
    """The error for an unknown `reduce_op` names the allowed values."""
    value = shaped(strategy, [(2,), (2,)])
    pattern = "Expected reduce_op to be one of.*SUM.*MEAN.*Received: reduce_op="
    for op in ("MAX", "", None, 3):
        calls = [
            partial(strategy.reduce, op, value, axis=None),
            partial(strategy.extended.reduce_to, op, value, value),
            partial(strategy.run, lambda x, op=op: here().all_reduce(op, x), args=(value,)),
        ]
        refused(lab, strategy, ValueError, pattern, *calls)


@case(replicas=(1, 2, 3))
def an_exception_in_every_replica(lab, strategy):
    """An exception in a step keeps its type and message; the traceback shows the step."""

    def step(given=None):
        raise Own("of the user's own")

    calls = partial(strategy.run, step), kd.function(lambda: strategy.run(step))
    merging = partial(strategy.run, lambda: here().merge_call(step))
    refused(lab, strategy, Own, "of the user's own", *calls, merging)
    try:
        strategy.run(step)
    except Own as error:
        names, trace = [], error.__traceback__
        while trace is not None:
            names.append(trace.tb_frame.f_code.co_name)
            trace = trace.tb_next
        lab.check("step" in names, f"the user's function is in the traceback, received {names}")


@case(replicas=(2, 3))
def an_exception_in_one_replica(lab, strategy):
    """If one replica raises an error, the replicas that wait for it end, too.

    On JAX one program is traced for all replicas, and a replica's number is no Python number. So
    there the error is raised in all replicas.
    """
    for which in range(lab.replicas):

        def step(which=which):
            number = here().replica_id_in_sync_group
            if lab.backend == "jax" or int(number) == which:
                raise Own("of the user's own")
            return here().all_reduce("SUM", ops.ones(2))

        refused(lab, strategy, Own, "of the user's own", partial(strategy.run, step))


UNEQUAL = ("tensorflow", "torch")


def odd_one(action):
    """Replica 1 acts once more than replica 0; on JAX both run one program, so it can't."""

    def step():
        action()
        if here().replica_id_in_sync_group == 1:
            action()
        return 1.0

    return step


@case(backends=UNEQUAL, replicas=(2, 3))
def unequal_numbers_of_all_reduces(lab, strategy):
    """Replicas that call different collectives end the step with an error."""

    def other_kinds():
        if here().replica_id_in_sync_group == 0:
            return here().all_reduce("SUM", ops.ones(2))
        return here().merge_call(lambda given: 1.0)

    for step in (
        odd_one(lambda: here().all_reduce("SUM", ops.ones(2))),
        odd_one(lambda: here().merge_call(lambda given: 1.0)),
        other_kinds,
    ):
        call = partial(strategy.run, step)
        refused(lab, strategy, kd.errors.ReplicaError, "Expected.*Received", call)


@case(backends=("jax",))
def a_replicas_number_is_no_python_number_on_jax(lab, strategy):
    """On JAX, a Python `if` on the replica's number is an error."""
    step = odd_one(lambda: here().all_reduce("SUM", ops.ones(2)))
    refused(lab, strategy, Exception, "tracer|trace|concrete", partial(strategy.run, step))


@case
def other_structures_from_other_replicas(lab, strategy):
    """Replicas must return equal structures; the order of dict keys may differ."""

    def step():
        number = here().replica_id_in_sync_group
        return [1.0] if lab.backend != "jax" and number == 1 else (1.0, 2.0)

    def in_another_order():
        items = [("a", 1.0), ("b", here().replica_id_in_sync_group)]
        is_other = lab.backend != "jax" and here().replica_id_in_sync_group == 1
        return dict(reversed(items) if is_other else items)

    if lab.backend == "jax":
        lab.equal(2, len(strategy.run(step)))
    else:
        with lab.raises(ValueError, "structure"):
            strategy.run(step)
    lab.equal([0, 1], lab.components(strategy.run(in_another_order)["b"], strategy))
    lab.still_usable(strategy)
