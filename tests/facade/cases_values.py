"""Distributed values: what they are, how they print, what takes them apart."""

import copy

import numpy as np

from tests.conformance.lazy import kd, keras, ops, tf
from tests.facade.case import case
from tests.facade.lab import FLOAT32, numbered, variable_of


def floats(strategy):
    return numbered(strategy, lambda i: ops.convert_to_tensor(float(i)))


@case(replicas=(2, 3))
def what_a_value_is(lab, strategy):
    """Classes, `values` and text of distributed values, from a function and from `run`."""
    given = floats(strategy)
    for value in (given, strategy.run(lambda x: x + 1.0, args=(given,))):
        lab.check(isinstance(value, kd.PerReplica), f"a PerReplica, received {type(value)}")
        lab.check(isinstance(value, kd.DistributedValues), "a DistributedValues")
        lab.check(not isinstance(value, kd.Mirrored), "its components differ")
        lab.equal(lab.replicas, len(value.values))
    reduced = strategy.extended.reduce_to("SUM", given, given)
    for one in strategy.experimental_local_results(reduced):
        lab.equal(sum(range(lab.replicas)), one)
    lab.check(not isinstance(reduced, kd.PerReplica), "a reduced value's components are equal")
    lab.check(not isinstance(ops.ones(2), kd.DistributedValues), "a tensor is none")
    # As TensorFlow's it prints its class, then a line a component.
    text = str(given)
    lines = text.splitlines()
    lab.check(lines[0] == "PerReplica:{" and lines[-1] == "}", f"received {text!r}")
    lab.check("\n  0: " in text and "\n  1: " in text, f"received {text!r}")
    lab.check("0." in lines[1] and "1." in lines[2], f"received {text!r}")
    lab.equal(repr(given)[:12], "PerReplica:{")


@case(replicas=(2, 3))
def keras_tree_takes_values_apart(lab, strategy):
    """`keras.tree` maps over the components of a value, and makes a value of the results."""
    nest = {"a": kd.PerReplica(tuple(range(lab.replicas))), "b": [kd.Mirrored((7,) * lab.replicas)]}
    lab.equal([*range(lab.replicas), *(7,) * lab.replicas], keras.tree.flatten(nest))
    mapped = keras.tree.map_structure(lambda one, other: one + other, nest, nest)
    lab.check(isinstance(mapped["a"], kd.PerReplica), "a value is made of the results")
    lab.check(isinstance(mapped["b"][0], kd.Mirrored), "of the same kind")
    lab.equal([2 * i for i in range(lab.replicas)], list(mapped["a"].values))
    packed = keras.tree.pack_sequence_as(nest, [*range(2 * lab.replicas)])
    lab.equal([*range(lab.replicas, 2 * lab.replicas)], list(packed["b"][0].values))
    result = strategy.run(lambda value: value * 1, args=(mapped["a"],))
    lab.equal([2 * i for i in range(lab.replicas)], lab.components(result, strategy))


@case(replicas=(2, 3))
def keras_tree_and_what_run_returns(lab, strategy):
    """For `keras.tree`, components of `run`'s results are leaves; on TensorFlow, whole values."""
    value = strategy.run(lambda x: x + 1.0, args=(floats(strategy),))
    expected = [1.0 + index for index in range(lab.replicas)]
    if lab.backend == "tensorflow":
        # Keras's own trainer relies on that, see docs/adr/0004-custom-loops.md.
        lab.check(keras.tree.flatten([value])[0] is value, "the framework's own value is a leaf")
        leaves = tf.nest.flatten(value, expand_composites=True)
    else:
        leaves = keras.tree.flatten([value])
        doubled = keras.tree.map_structure(lambda leaf: leaf * 2.0, [value])
        again = strategy.run(lambda x: x[0] * 1.0, args=(doubled,))
        lab.equal([2.0 * one for one in expected], lab.components(again, strategy))
    lab.equal(expected, leaves)
    same = keras.tree.map_structure(lambda leaf: leaf, {"a": value, "b": [value]})
    result = strategy.run(lambda n: n["a"] + n["b"][0], args=(same,))
    lab.equal([2.0 * one for one in expected], lab.components(result, strategy))


@case(replicas=(1, 2, 3))
def local_results(lab, strategy):
    """`local_results` takes distributed values, variables, tensors, other objects and nests."""
    value = floats(strategy)
    lab.equal(list(map(float, range(lab.replicas))), lab.components(value, strategy))
    nest = strategy.local_results({"a": value, "b": (value,)})
    lab.equal(lab.replicas, len(nest))
    for index, one in enumerate(nest):
        lab.equal({"a": float(index), "b": [float(index)]}, one)
    variable = variable_of(strategy, [1.0, 2.0])
    lab.equal([[1.0, 2.0]] * lab.replicas, lab.components(variable, strategy))
    lab.equal([[5.0]], lab.components(ops.convert_to_tensor([5.0]), strategy))
    lab.equal(("text",), strategy.local_results("text"))
    lab.equal([None] * lab.replicas, [one[1] for one in strategy.local_results((value, None))])


@case
def values_of_objects(lab, strategy):
    """The function of `distribute_values_from_function` may return any objects, and nests."""
    tensors = [ops.convert_to_tensor(1.0 + i) for i in range(strategy.num_replicas_in_sync)]
    value = strategy.distribute_values_from_function(
        lambda context: {
            "number": context.replica_id_in_sync_group,
            "array": np.full(2, context.replica_id_in_sync_group, "int32"),
            "count": context.num_replicas_in_sync,
            "made before": tensors[context.replica_id_in_sync_group],
        }
    )
    lab.equal((2, 2), strategy.local_results(value["count"]))
    lab.equal([1.0, 2.0], lab.components(value["made before"], strategy))
    by_hand = kd.ValueContext(replica_id_in_sync_group=2, num_replicas_in_sync=4)
    lab.equal(0.5, by_hand.replica_id_in_sync_group / by_hand.num_replicas_in_sync)
    lab.equal([0, 1], [int(one) for one in strategy.local_results(value["number"])])
    lab.equal([[0, 0], [1, 1]], lab.components(value["array"], strategy))


@case
def a_strategy_is_never_copied(lab, strategy):
    """`copy.deepcopy` keeps the same strategy; `copy.copy` of a strategy is refused."""
    lab.check(copy.deepcopy([strategy])[0] is strategy, "a deep copy shares the strategy")
    with lab.raises(RuntimeError, r"no copy of a strategy.*Received: copy\.copy"):
        copy.copy(strategy)
    lab.still_usable(strategy)


@case(replicas=(2, 3))
def reduce_values(lab, strategy):
    """`reduce` takes nests and integers, with no axis, one axis or several axes."""
    n = lab.replicas
    value = floats(strategy)
    total = n * (n - 1) / 2
    lab.equal(total, strategy.reduce("SUM", value, axis=None))
    lab.equal(total / n, strategy.reduce(kd.ReduceOp.MEAN, value, axis=None))
    nest = strategy.reduce("sum", {"a": value, "b": [value]}, axis=None)
    lab.equal({"a": total, "b": [total]}, nest)
    plain = ops.convert_to_tensor([1.0, 3.0])
    lab.equal([n * 1.0, n * 3.0], strategy.reduce("SUM", plain, axis=None))
    lab.equal([1.0, 3.0], strategy.reduce("MEAN", plain, axis=None))
    rows = numbered(strategy, lambda i: np.full((i + 1, 2), 1.0 + i).astype("float32"))
    squares = sum((index + 1) ** 2 for index in range(n))
    count = n * (n + 1) / 2
    lab.equal([squares] * 2, strategy.reduce("SUM", rows, axis=0))
    lab.equal([squares / count] * 2, strategy.reduce("MEAN", rows, axis=0), FLOAT32)
    pair = lab.strategy(2)
    whole = numbered(pair, lambda i: np.arange(6, dtype="float32").reshape(2, 3) + i)
    for axis in (1, -1):
        lab.equal([9.0, 27.0], pair.reduce("SUM", whole, axis=axis))
        lab.equal([1.5, 4.5], pair.reduce("MEAN", whole, axis=axis))
    for axes in ((0, 1), [-1, 0]):
        lab.equal(36.0, pair.reduce("SUM", whole, axis=axes))
        lab.equal(3.0, pair.reduce("MEAN", whole, axis=axes))
        lab.equal(squares / count, strategy.reduce("MEAN", rows, axis=axes), FLOAT32)
    # A sum of integers has their type, a mean is a float.
    integers = numbered(pair, lambda i: np.array([[1], [4]][i], "int32"))
    lab.equal(np.array([5], "int32"), lab.numpy(pair.reduce("SUM", integers, axis=None)))
    lab.equal(2.5, float(pair.reduce("MEAN", integers, axis=None)[0]))
    lab.equal(2.5, float(pair.reduce("MEAN", integers, axis=0)))

    def in_merge_call():
        merged = lambda given, x: given.reduce("SUM", x, axis=0)  # noqa: E731
        return kd.get_replica_context().merge_call(merged, args=(ops.ones(3, "uint8"),))

    lab.equal([np.uint8(6)] * 2, lab.components(pair.run(in_merge_call), pair))


@case(replicas=(2, 3))
def gather_values(lab, strategy):
    """`gather` takes components of different sizes, nests, tensors, variables and any axis."""
    rows = numbered(strategy, lambda i: np.full((2, i + 1), i))
    expected = np.concatenate([np.full((2, i + 1), i) for i in range(lab.replicas)], axis=1)
    for axis in (1, -1):
        lab.equal(expected.tolist(), strategy.gather(rows, axis=axis))
    flags = numbered(strategy, lambda i: np.array([i % 2 == 0]))
    nest = strategy.gather({"flags": flags, "rows": rows}, axis=-1)
    lab.equal(np.array([i % 2 == 0 for i in range(lab.replicas)]), nest["flags"])
    for same in (ops.ones((2,)), variable_of(strategy, [1.0, 1.0])):
        lab.equal([1.0, 1.0] * lab.replicas, strategy.gather(same, axis=0))
    lab.equal(expected.tolist(), nest["rows"])
