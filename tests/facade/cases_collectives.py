"""All-reduce and all-gather in replicas: nests, types, sizes, gradients."""

import numpy as np

from tests.conformance.lazy import kd, keras, ops, tf
from tests.facade.case import case
from tests.facade.lab import FLOAT32, numbered, variable_of


def here():
    return kd.get_replica_context()


@case(replicas=(1, 2, 3, 4))
def sums_and_means_of_nests(lab, strategy):
    """`all_reduce` sums or averages each tensor in nested dicts, lists and tuples."""
    n = lab.replicas
    x = numbered(strategy, lambda i: np.arange(3, dtype="float32") + i)

    def step(x):
        nest = {"a": x, "b": [x * 2, (ops.sum(x),)]}
        return here().all_reduce("SUM", nest), here().all_reduce("mean", nest)

    total = sum(np.arange(3, dtype="float32") + i for i in range(n))
    sums, means = strategy.run(step, args=(x,))
    one = {"a": total, "b": [total * 2, [np.float32(total.sum())]]}
    lab.equal([one] * n, lab.components(sums, strategy))
    mean = {"a": total / n, "b": [total * 2 / n, [np.float32(total.sum() / n)]]}
    lab.equal([mean] * n, lab.components(means, strategy), FLOAT32)


@case
def types_together(lab, strategy):
    """One `all_reduce` takes several types and shapes; options do not change the results.

    A mean of integers is a float.
    """
    x = numbered(strategy, lambda i: np.array([1 + i, 4], "int32"))
    result = strategy.run(lambda x: here().all_reduce("MEAN", x), args=(x,))
    lab.equal([[1.5, 4.0]] * 2, [one.tolist() for one in lab.components(result, strategy)])
    for options in (
        None,
        kd.CommunicationOptions(bytes_per_pack=4),
        kd.CommunicationOptions(bytes_per_pack=16),
        kd.CommunicationOptions(implementation="ring"),
        kd.CommunicationOptions(timeout_seconds=30.0),
        kd.CommunicationOptions(implementation=kd.CommunicationImplementation.AUTO),
    ):

        def step(options=options):
            values = [
                ops.ones((3,), "float32"),
                ops.ones((2, 2), "int32"),
                ops.ones((), "float16"),
                ops.ones((2,), "bfloat16"),
                {"deep": ops.ones((1, 5), "float32")},
            ]
            sums = here().all_reduce("SUM", values, options)
            given, found = (
                [keras.backend.standardize_dtype(one.dtype) for one in keras.tree.flatten(nest)]
                for nest in (values, sums)
            )
            lab.equal(given, found)
            return sums

        expected = [
            np.full(3, 2, "float32"),
            np.full((2, 2), 2, "int32"),
            np.array(2, "float16"),
            [2.0, 2.0],
            {"deep": np.full((1, 5), 2, "float32")},
        ]
        lab.equal([expected] * 2, lab.components(strategy.run(step), strategy))


@case
def booleans_have_no_sum(lab, strategy):
    """`all_reduce` and `reduce` refuse booleans; the error says what to do instead."""
    with lab.raises(TypeError, "numbers to add.*bool"):
        strategy.run(lambda: here().all_reduce("SUM", ops.convert_to_tensor([True, False])))
    lab.still_usable(strategy)
    flags = numbered(strategy, lambda i: np.array([i == 0]))
    with lab.raises(TypeError, "numbers to add.*bool"):
        strategy.reduce("SUM", flags, axis=None)
    lab.still_usable(strategy)


@case(replicas=(1, 2, 3))
def gathers_of_other_sizes(lab, strategy):
    """`all_gather` takes sizes that differ by replica, and a negative axis."""
    n = lab.replicas
    x = numbered(strategy, lambda i: np.full((2, i + 1), i, "float32"))
    expected = np.concatenate([np.full((2, i + 1), i, "float32") for i in range(n)], axis=1)
    for axis in (1, -1):
        step = lambda x, axis=axis: here().all_gather(x, axis=axis)  # noqa: E731
        result = strategy.run(step, args=(x,))
        lab.equal([expected] * n, lab.components(result, strategy))


@case
def gathers_of_nests_and_types(lab, strategy):
    """`all_gather` gathers booleans and integers of any rank in nests, compiled or not."""
    x = numbered(strategy, lambda i: {"f": np.array([i == 0]), "n": np.array([[i, 1]], "int32")})
    expected = {"f": np.array([True, False]), "n": np.array([[0, 1], [1, 1]], "int32")}
    run = lambda x: strategy.run(lambda x: here().all_gather(x, axis=0), args=(x,))  # noqa: E731
    for gathered in (run(x), kd.function(run)(x)):
        lab.equal([expected] * 2, lab.components(gathered, strategy))


@case(replicas=(1, 2, 3))
def gradient_of_an_all_reduce(lab, strategy):
    """The gradient through an `all_reduce` is reduced over the replicas in the same way."""
    n = lab.replicas
    v = variable_of(strategy, [1.0, 2.0])
    index = numbered(strategy, lambda i: np.float32(i + 1))
    for operation, scale in (("SUM", n * (n + 1) / 2), ("MEAN", (n + 1) / 2)):

        def step(i, operation=operation):
            def loss():
                total = here().all_reduce(operation, i * v)  # scale * v
                return i * ops.sum(total * total)

            return kd.value_and_grad(loss, [v])

        value, [gradient] = strategy.run(step, args=(index,))
        expected = [(i + 1) * scale**2 * 5.0 for i in range(n)]
        lab.equal(expected, lab.components(value, strategy), FLOAT32)
        # Each replica's own is (i+1) * reduced((j+1) * 2 * scale * v).
        expected = [(i + 1) * 2 * scale * scale * np.float32([1.0, 2.0]) for i in range(n)]
        lab.equal(expected, lab.components(gradient, strategy), FLOAT32)


@case(replicas=(1, 2, 3))
def gradient_of_an_all_gather(lab, strategy):
    """The gradient through an `all_gather` is summed over replicas; each gets its own rows."""
    for size in (lambda i: 2, lambda i: i + 1):
        gathering(lab, strategy, size)


def gathering(lab, strategy, size):
    n = lab.replicas
    v = variable_of(strategy, 2.0)
    rows = numbered(strategy, lambda i: np.arange(size(i), dtype="float32") + 1 + i)
    scale = numbered(strategy, lambda i: np.float32(i + 1))

    def step(x, s):
        def loss():
            every = here().all_gather(x * v, axis=0)
            weights = ops.cast(ops.arange(sum(map(size, range(n)))), "float32")
            return s * ops.sum(every * weights)

        return kd.value_and_grad(loss, [v])

    value, [gradient] = strategy.run(step, args=(rows, scale))
    every = np.concatenate([np.arange(size(i)) + 1.0 + i for i in range(n)])
    weights = np.arange(len(every))
    lab.equal(
        [np.float32((i + 1) * 2 * (every * weights).sum()) for i in range(n)],
        lab.components(value, strategy),
        FLOAT32,
    )
    sums, begin, expected = n * (n + 1) / 2, 0, []
    for i in range(n):
        part = slice(begin, begin + size(i))
        expected.append(np.float32(sums * (every[part] * weights[part]).sum()))
        begin += size(i)
    lab.equal(expected, lab.components(gradient, strategy), FLOAT32)


@case
def second_gradients(lab, strategy):
    """A second derivative through an `all_reduce` is right, compiled or not."""
    v = variable_of(strategy, 3.0)

    def step(i):
        def loss():
            total = here().all_reduce("SUM", i * v)
            return total * total

        return kd.value_and_grad(lambda: kd.value_and_grad(loss, [v])[1][0], [v])

    index = numbered(strategy, lambda i: np.float32(i + 1))
    for run in (strategy.run, kd.function(strategy.run)):
        # i times the sum over the replicas of twice 1 v + 2 v; i times twice 2 (1 + 2).
        value, [gradient] = run(step, args=(index,))
        lab.equal([36.0, 72.0], lab.components(value, strategy), FLOAT32)
        lab.equal([12.0, 24.0], lab.components(gradient, strategy), FLOAT32)


@case(backends=("tensorflow",))
def sparse_gradients(lab):
    """On TensorFlow, `all_reduce` sums `tf.IndexedSlices`."""
    strategy = lab.strategy()

    def slices():
        number = here().replica_id_in_sync_group
        return tf.IndexedSlices(tf.ones((1, 2)), tf.reshape(number, (1,)), tf.constant((3, 2)))

    dense = np.float32([[1, 1], [1, 1], [0, 0]])
    summed = strategy.run(lambda: tf.convert_to_tensor(here().all_reduce("SUM", slices())))
    lab.equal([dense] * 2, lab.components(summed, strategy))
    for op, expected in (("SUM", dense), ("MEAN", dense / 2)):
        reduced = strategy.reduce(op, strategy.run(slices), axis=None)
        lab.equal(expected, tf.convert_to_tensor(reduced))
