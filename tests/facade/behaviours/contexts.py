"""Whose code runs where; the strategies themselves."""

import copy
import threading

import numpy as np

from tests.conformance.lazy import kd, keras, ops
from tests.facade.behaviours import behaviour
from tests.facade.lab import numbered


def is_default_state():
    default = kd.get_strategy()
    here = kd.get_replica_context()
    return (
        default is kd.get_strategy()
        and here is not None
        and here is kd.get_replica_context()
        and here.strategy is default
        and not kd.in_cross_replica_context()
        and not kd.has_strategy()
    )


def in_scope_of(strategy):
    return (
        kd.get_strategy() is strategy
        and kd.has_strategy()
        and kd.in_cross_replica_context()
        and kd.get_replica_context() is None
    )


@behaviour("Outside of all scopes, code runs in the replica context of the default strategy")
def _(lab, s):
    lab.check(is_default_state(), "the default state")
    lab.equal(1, kd.get_strategy().num_replicas_in_sync)
    lab.equal(0, kd.get_replica_context().replica_id_in_sync_group)


@behaviour(
    "`strategy.scope()` returns the strategy, and enters cross-replica context until the scope ends"
)
def _(lab, s):
    with s.scope() as given:
        lab.check(given is s and in_scope_of(s), "in its scope")
    lab.check(is_default_state(), "after it")


@behaviour("A scope object can be stored, entered several times, and entered inside of itself")
def _(lab, s):
    first, second = s.scope(), s.scope()
    with first, second, first:
        lab.check(in_scope_of(s), "in three scopes")
    with second:
        lab.check(in_scope_of(s), "again")
    lab.check(is_default_state(), "after them")


@behaviour("An exception in a scope leaves the scope")
def _(lab, s):
    with lab.raises(KeyError, "own"), s.scope():
        raise KeyError("own")
    lab.check(is_default_state(), "after the error")


@behaviour("Entering the scope of another strategy inside of a scope raises a RuntimeError")
def _(lab, s):
    other = lab.strategy()
    with s.scope():
        with lab.raises(RuntimeError, "one strategy at a time"), other.scope():
            pass
        lab.check(in_scope_of(s), "the first stays")


@behaviour("Calling `run` of another strategy inside of a scope raises a RuntimeError")
def _(lab, s):
    other = lab.strategy()
    with other.scope(), lab.raises(RuntimeError, "one strategy at a time"):
        s.run(lambda: 1.0)


@behaviour("Entering the scope of the default strategy changes nothing")
def _(lab, s):
    with kd.get_strategy().scope():
        lab.check(not kd.has_strategy(), "no other strategy")


@behaviour("A scope applies only to its own thread; other threads have the default strategy")
def _(lab, s):
    found = []
    with s.scope():
        thread = threading.Thread(target=lambda: found.append(is_default_state()))
        thread.start()
        thread.join()
    lab.equal([True], found)


@behaviour(
    "In `run` each replica has a replica context, whether `run` is called inside or outside of the"
    " scope"
)
def _(lab, s):
    seen = []

    def step():
        here = kd.get_replica_context()
        seen.append(here is not None and not kd.in_cross_replica_context() and kd.has_strategy())
        seen.append(kd.get_strategy() is s and here.strategy is s)
        return ops.ones(())

    s.run(step)
    with s.scope():
        s.run(step)
    lab.check(seen and all(seen), f"{seen}")
    lab.check(is_default_state(), "after it")


@behaviour("An exception in `run` leaves the replica context")
def _(lab, s):
    def step():
        raise KeyError("own")

    with lab.raises(KeyError, "own"):
        s.run(step)
    lab.check(is_default_state(), "after the error")


@behaviour(
    "`replica_id_in_sync_group` counts from 0, and `num_replicas_in_sync` is the number of replicas"
)
def _(lab, s):
    found = s.run(lambda: kd.get_replica_context().replica_id_in_sync_group + 0)
    lab.equal([0, 1], lab.components(found, s))
    counts = {s.run(lambda: kd.get_replica_context().num_replicas_in_sync), 2}
    lab.equal(1, len(counts))


@behaviour(
    "`merge_call` calls its function in cross-replica context, with the strategy as the first "
    "argument"
)
def _(lab, s):
    seen = []

    def merge(given, x):
        seen.append(given is s and in_scope_of(s))
        return given.reduce("SUM", x, axis=None)

    value = numbered(s, lambda i: np.float32(i + 1))
    found = s.run(lambda x: kd.get_replica_context().merge_call(merge, args=(x,)), args=(value,))
    lab.equal([3.0, 3.0], lab.components(found, s))
    lab.check(seen and all(seen), "cross-replica code")


@behaviour("`merge_call` returns what its function returns: a string, None, or a nested structure")
def _(lab, s):
    def step():
        here = kd.get_replica_context()
        lab.equal("text", here.merge_call(lambda _: "text"))
        lab.check(here.merge_call(lambda _: None) is None, "None")
        return here.merge_call(lambda _: {"a": ops.ones(2), "b": [1.0, 2.0]})["a"]

    lab.equal([[1.0, 1.0]] * 2, lab.components(s.run(step), s))


@behaviour("`strategy.run` in the function of a `merge_call` runs on all replicas")
def _(lab, s):
    def step(x):
        merge = lambda given, x: given.run(lambda x: x * 2.0, args=(x,))  # noqa: E731
        return kd.get_replica_context().merge_call(merge, args=(x,))

    value = numbered(s, lambda i: np.float32(i + 1))
    lab.equal([2.0, 4.0], lab.components(s.run(step, args=(value,)), s))


@behaviour(
    "Under the default strategy, `merge_call` only calls its function, with this strategy as the "
    "first argument"
)
def _(lab, s):
    found = kd.get_replica_context().merge_call(lambda given, x: (given, x), args=(5,))
    lab.check(found[0] is kd.get_strategy() and found[1] == 5, f"{found}")


@behaviour(
    "Calling `all_reduce` of a replica context that is not the current context raises a "
    "RuntimeError"
)
def _(lab, s):
    here = kd.get_replica_context()
    with s.scope(), lab.raises(RuntimeError, "not|Expected all_reduce on the context"):
        here.all_reduce("SUM", ops.ones(()))


@behaviour("`extended.call_for_each_replica` does the same as `run`")
def _(lab, s):
    with s.scope():
        found = s.extended.call_for_each_replica(lambda x, y: x + y, args=(1.0,), kwargs={"y": 2.0})
    lab.equal([3.0], sorted({float(one) for one in lab.components(found, s)}))


@behaviour(
    "A strategy can be a key of a dict, is equal only to itself, and is not copied by "
    "`copy.deepcopy`"
)
def _(lab, s):

    other = lab.strategy()
    lab.check({s: 1}[s] == 1 and s != other and copy.deepcopy([s])[0] is s, "by identity")


@behaviour("Devices may be named as in `tf.distribute`: `CPU:0`, `/cpu:0` or `/device:CPU:0`")
def _(lab, s):
    for names in (["CPU:0", "CPU:1"], ["/cpu:0", "/cpu:1"], ["/device:CPU:0", "/device:CPU:1"]):
        lab.equal(["cpu:0", "cpu:1"], list(kd.MirroredStrategy(names).extended.worker_devices))


@behaviour(
    "An empty list of devices, a device named twice, and a device that does not exist raise a "
    "ValueError"
)
def _(lab, s):
    for names in ([], ["cpu:0", "cpu:0"], ["cpu:99"]):
        with lab.raises(ValueError, "Expected.*Received"):
            kd.MirroredStrategy(names)


@behaviour(
    "`MirroredStrategy` with one device has one replica, and its `run` returns plain tensors"
)
def _(lab, s):
    one = kd.MirroredStrategy(["cpu:0"])
    lab.equal(1, one.num_replicas_in_sync)
    found = one.run(lambda x: x * 2.0, args=(ops.ones(()),))
    lab.equal(2.0, found)
    lab.equal(1, len(one.local_results(found)))


@behaviour(
    "`OneDeviceStrategy` runs on its device; `gather`, and `reduce` without an axis, return the "
    "value itself"
)
def _(lab, s):
    one = kd.OneDeviceStrategy("cpu:1")
    found = one.run(lambda: ops.ones((2,)) * 3.0)
    expected = "cpu:0" if lab.backend == "torch" else "cpu:1"  # torch has one CPU device
    lab.equal(expected, lab.device(found))
    for op in ("SUM", "MEAN"):
        lab.equal([3.0, 3.0], one.reduce(op, found, axis=None))
    lab.equal(6.0, one.reduce("SUM", found, axis=0))
    lab.equal([3.0, 3.0], one.gather(found, axis=0))


@behaviour("A variable made under `OneDeviceStrategy` is on the device of the strategy")
def _(lab, s):
    with kd.OneDeviceStrategy("cpu:1").scope():
        variable = keras.Variable([1.0])
    expected = "cpu:0" if lab.backend == "torch" else "cpu:1"
    lab.equal(expected, lab.device(variable.value))


EQUAL_COPIES = (
    "`local_results` of a variable returns one component per replica, and all of them are equal."
)


@behaviour(
    "`CentralStorageStrategy` holds each variable once, on its parameter device",
    jax=EQUAL_COPIES,
    torch=EQUAL_COPIES,
)
def _(lab, s):
    central = kd.CentralStorageStrategy(lab.devices, "cpu:1")
    lab.equal(["cpu:1"], list(central.extended.parameter_devices))
    lab.equal(lab.devices, list(central.extended.worker_devices))
    with central.scope():
        variable = keras.Variable(2.0)
    copies = 1 if lab.backend == "tensorflow" else 2
    lab.equal([2.0] * copies, lab.components(variable, central))
    lab.equal([2.0, 2.0], lab.components(central.run(lambda: variable + 0.0), central))


@behaviour(
    "Under `CentralStorageStrategy`, `extended.update` calls its function once, also with "
    "`group=False`"
)
def _(lab, s):
    central = kd.CentralStorageStrategy(lab.devices)
    with central.scope():
        variable = keras.Variable(1.0)
        found = central.extended.update(variable, lambda v: v.assign_add(1.0), group=False)
    lab.equal(1, len(found))
    lab.equal(2.0, variable)


@behaviour("Two strategies can be used alternately in one process")
def _(lab, s):
    other = lab.strategy(3)
    for one, total in ((s, 2.0), (other, 3.0), (s, 2.0)):
        found = one.run(lambda: kd.get_replica_context().all_reduce("SUM", ops.ones(())))
        lab.equal(total, one.local_results(found)[0])


@behaviour("If a strategy uses a single process, `cluster_resolver` is None and `is_chief` is True")
def _(lab, s):
    lab.check(s.cluster_resolver is None and s.is_chief, "alone")
    lab.check(s.extended.should_checkpoint and s.extended.should_save_summary, "it writes files")


@behaviour("`experimental_set_strategy` enters a scope for all code that follows in this thread")
def _(lab, s):
    found, other = [], lab.strategy()
    kd.experimental_set_strategy(other)
    try:
        kd.experimental_set_strategy(s)  # in place of the other
        lab.check(in_scope_of(s), "as in its scope")
        variable = keras.Variable(1.0)
        lab.equal(2, len(lab.components(variable, s)))
        with s.scope(), lab.raises(RuntimeError, "outside of scopes.*Leave the scope"):
            kd.experimental_set_strategy(None)
        with lab.raises(RuntimeError, "outside of scopes and replicas"):
            s.run(lambda: kd.experimental_set_strategy(None))
        thread = threading.Thread(target=lambda: found.append(is_default_state()))
        thread.start()
        thread.join()
        lab.equal([True], found)
    finally:
        kd.experimental_set_strategy(None)
    lab.check(is_default_state(), "after it")
    with s.scope(), lab.raises(RuntimeError, "outside of scopes"):
        kd.experimental_set_strategy(s)


@behaviour(
    "The caller of `run` gets an exception that a nested `run` or `merge_call` raises in the "
    "function of a `merge_call`"
)
def _(lab, s):
    def fail(*_):
        raise ZeroDivisionError("own words")

    def failing_merge():
        kd.get_replica_context().merge_call(fail)

    for inner in (fail, failing_merge):
        with lab.raises(ZeroDivisionError, "own words"):
            merge = lambda given, inner=inner: given.run(inner)  # noqa: E731
            s.run(lambda merge=merge: kd.get_replica_context().merge_call(merge))
        lab.still_usable(s)
