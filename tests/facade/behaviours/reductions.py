"""`reduce`, `gather` and the collectives of a replica."""

import numpy as np

from tests.conformance.lazy import kd, keras, ops
from tests.facade.behaviours import behaviour
from tests.facade.lab import numbered, variable_of


def counting(s):
    """Returns the values 1.0, 2.0, ..., one for each replica."""
    return numbered(s, lambda i: np.float32(i + 1))


def vectors(s):
    """[0, 0], [1, 1]."""
    return numbered(s, lambda i: np.full(2, i, "float32"))


def ragged(s):
    """A row, then two."""
    return numbered(s, lambda i: np.full((i + 1, 3), i, "float32"))


def each(s, step, *args):
    """What a step returns in replicas, as it is and compiled."""
    for run in (s.run, kd.function(s.run)):
        yield run(step, args=args)


@behaviour(
    "`reduce` returns the sum or the mean over the replicas, inside and outside of the scope, "
    "compiled or not"
)
def _(lab, s):
    value = counting(s)
    for call in (s.reduce, kd.function(s.reduce)):
        lab.equal(3.0, call("SUM", value, None))
        with s.scope():
            lab.equal(1.5, call("MEAN", value, None))


@behaviour("`reduce` takes a `ReduceOp`, or the name of one in upper or lower case")
def _(lab, s):
    for op in ("sum", "SUM", "Sum", kd.ReduceOp.SUM):
        lab.equal(3.0, s.reduce(op, counting(s), axis=None))
    for op in ("mean", kd.ReduceOp.MEAN):
        lab.equal(1.5, s.reduce(op, counting(s), axis=None))


@behaviour("`reduce` treats a tensor or a number as a value that every replica has")
def _(lab, s):
    for value in (ops.convert_to_tensor(4.0), 4.0, np.float32(4.0)):
        lab.equal(8.0, s.reduce("SUM", value, axis=None))
        lab.equal(4.0, s.reduce("MEAN", value, axis=None))


@behaviour(
    "`reduce` with an axis also reduces along this axis; the axis may be negative, and there may "
    "be several"
)
def _(lab, s):
    lab.equal(2.0, s.reduce("SUM", vectors(s), axis=0))
    lab.equal(0.5, s.reduce("MEAN", vectors(s), axis=-1))
    value = numbered(s, lambda i: np.full((2, 3), i, "float32"))
    lab.equal([2.0] * 3, s.reduce("SUM", value, axis=0))
    lab.equal(6.0, s.reduce("SUM", value, axis=(0, 1)))
    lab.equal(0.5, s.reduce("MEAN", value, axis=[0, 1]))


@behaviour(
    "If the values of the replicas have different sizes along the axis, `MEAN` is the mean over "
    "all elements"
)
def _(lab, s):
    lab.equal([2.0] * 3, s.reduce("SUM", ragged(s), axis=0))
    lab.equal(np.full(3, 2 / 3, "float32"), s.reduce("MEAN", ragged(s), axis=0))


@behaviour("`reduce` of a nested structure reduces each tensor in it")
def _(lab, s):
    value = numbered(s, lambda i: {"a": np.float32(i), "b": [np.float32(2 * i)]})
    found = s.reduce("SUM", value, axis=None)
    lab.equal(1.0, found["a"])
    lab.equal(2.0, found["b"][0])


@behaviour("The sum of integers has the type of these integers")
def _(lab, s):
    found = s.reduce("SUM", numbered(s, lambda i: np.int32(i + 1)), axis=None)
    lab.equal(np.int32(3), found)


@behaviour("`reduce` takes what `run` returns, and `run` takes what `reduce` returns")
def _(lab, s):
    squares = s.run(lambda x: x * x, args=(counting(s),))
    total = s.reduce("SUM", squares, axis=None)
    lab.equal(5.0, total)
    lab.equal([6.0, 7.0], lab.components(s.run(lambda x, y: x + y, args=(total, counting(s))), s))


@behaviour("The sum of a mirrored variable adds its value once for each replica")
def _(lab, s):
    variable = variable_of(s, 3.0)
    lab.equal(6.0, s.reduce("SUM", variable, axis=None))
    lab.equal(3.0, s.reduce("MEAN", variable, axis=None))


@behaviour("`extended.reduce_to` and `extended.batch_reduce_to` add a tensor once for each replica")
def _(lab, s):
    one = ops.ones(())
    with s.scope():
        both = [s.extended.reduce_to("SUM", one, one)]
        both += s.extended.batch_reduce_to("SUM", [(one, one), (one, "cpu:0")])
    for value in both:
        lab.equal(2.0, lab.components(value, s)[0])


@behaviour("Every replica in `run` can read the result of an earlier `extended.reduce_to`")
def _(lab, s):
    with s.scope():
        total = s.extended.reduce_to("SUM", counting(s), "cpu:0")
    lab.equal([4.0, 5.0], lab.components(s.run(lambda x, y: x + y, args=(total, counting(s))), s))


@behaviour("`gather` concatenates the values of the replicas along any axis")
def _(lab, s):
    lab.equal([0, 0, 1, 1], s.gather(vectors(s), axis=0))
    value = numbered(s, lambda i: np.full((1, 2), i, "float32"))
    lab.equal([[0, 0], [1, 1]], s.gather(value, axis=0))
    lab.equal([[0, 0, 1, 1]], s.gather(value, axis=1))
    lab.equal([[0, 0, 1, 1]], s.gather(value, axis=-1))


@behaviour(
    "`gather` takes values of different sizes along its axis; different sizes along another axis "
    "raise an error"
)
def _(lab, s):
    lab.equal([[0] * 3, [1] * 3, [1] * 3], s.gather(ragged(s), axis=0))
    with lab.raises(ValueError, "shape"):
        s.gather(ragged(s), axis=1)


@behaviour(
    "`gather` of a tensor repeats the tensor for each replica; `gather` of scalars raises an error"
)
def _(lab, s):
    lab.equal([1, 2, 1, 2], s.gather(ops.convert_to_tensor([1, 2]), axis=0))
    with lab.raises(ValueError, "axis"):
        s.gather(counting(s), axis=0)


@behaviour(
    "`gather` takes nested structures, several dimensions, booleans, and values without rows"
)
def _(lab, s):
    value = numbered(s, lambda i: {"a": np.full((i, 2, 2), i, "float32"), "b": np.array([i == 1])})
    found = s.gather(value, axis=0)
    lab.equal(np.ones((1, 2, 2), "float32"), found["a"])
    lab.equal(np.array([False, True]), found["b"])


@behaviour("`gather` works in a compiled function")
def _(lab, s):
    lab.equal([0, 0, 1, 1], kd.function(lambda v: s.gather(v, axis=0))(vectors(s)))


@behaviour("`gather` works in the function of a `merge_call`")
def _(lab, s):
    def step(x):
        merge = lambda given, x: given.gather(x, axis=0)  # noqa: E731
        return kd.get_replica_context().merge_call(merge, args=(x,))

    for found in each(s, step, vectors(s)):
        lab.equal([[0, 0, 1, 1]] * 2, lab.components(found, s))


@behaviour(
    "In a replica, `all_reduce` returns the sum or the mean over the replicas, compiled or not"
)
def _(lab, s):
    for op, total in (("SUM", 3.0), ("MEAN", 1.5)):
        step = lambda x, op=op: kd.get_replica_context().all_reduce(op, x)  # noqa: E731
        for found in each(s, step, counting(s)):
            lab.equal([total] * 2, lab.components(found, s))


@behaviour("`all_reduce` of a number, a tuple or a dict returns the same structure")
def _(lab, s):
    def step():
        here = kd.get_replica_context()
        first, second = here.all_reduce("SUM", (1.0, ops.ones((2,))))
        return {"a": first, "b": second, "c": here.all_reduce("MEAN", {"x": 5.0})["x"]}

    found = s.run(step)
    lab.equal([2.0, 2.0], lab.components(found["a"], s))
    lab.equal([[2.0, 2.0]] * 2, lab.components(found["b"], s))
    lab.equal([5.0, 5.0], lab.components(found["c"], s))


@behaviour("An `all_reduce` can use the result of the `all_reduce` before it")
def _(lab, s):
    def step(x):
        here = kd.get_replica_context()
        return here.all_reduce("SUM", here.all_reduce("SUM", x) * x)

    for found in each(s, step, counting(s)):
        lab.equal([9.0, 9.0], lab.components(found, s))


@behaviour("`all_gather` in a replica returns what `gather` returns outside of replicas")
def _(lab, s):
    step = lambda x: kd.get_replica_context().all_gather(x, axis=0)  # noqa: E731
    for value in (vectors(s), ragged(s)):
        for found in each(s, step, value):
            for part in lab.components(found, s):
                lab.equal(lab.numpy(s.gather(value, axis=0)), part)


@behaviour("The gradient of an `all_reduce` by sum is again an `all_reduce` by sum")
def _(lab, s):
    variable = variable_of(s, 2.0)

    def step(x):
        loss = lambda: kd.get_replica_context().all_reduce("SUM", variable * x)  # noqa: E731
        return kd.value_and_grad(loss, [variable])[1][0]

    for found in each(s, step, counting(s)):
        lab.equal([2.0, 4.0], lab.components(found, s))


@behaviour(
    "`CommunicationOptions` do not change the result; an object of another type raises a TypeError"
)
def _(lab, s):
    options = kd.CommunicationOptions(bytes_per_pack=8, timeout_seconds=60.0)
    step = lambda x: kd.get_replica_context().all_reduce("SUM", x, options)  # noqa: E731
    lab.equal([3.0, 3.0], lab.components(s.run(step, args=(counting(s),)), s))
    with s.scope(), lab.raises(TypeError, "Expected options to be kerasdist.Commun.*Received"):
        s.extended.reduce_to("SUM", counting(s), "cpu:0", "fast")


@behaviour(
    "`reduce` and `gather` in a replica raise a RuntimeError that names the method to call instead"
)
def _(lab, s):
    for call, instead in ((s.reduce, "all_reduce"), (s.gather, "all_gather")):
        arguments = ("SUM", 1.0, None) if call == s.reduce else (1.0, 0)
        with lab.raises(RuntimeError, instead):
            s.run(lambda call=call, arguments=arguments: call(*arguments))


@behaviour("The sum of float16 or bfloat16 values has the same type as the values")
def _(lab, s):
    for dtype in ("float16", "bfloat16"):

        def step(x, dtype=dtype):
            return kd.get_replica_context().all_reduce("SUM", ops.cast(x, dtype))

        found = s.local_results(s.run(step, args=(counting(s),)))[0]
        lab.equal(dtype, keras.backend.standardize_dtype(found.dtype))
        lab.equal(3.0, ops.cast(found, "float32"))


@behaviour(
    "`experimental_local_results` returns a tuple with one value per replica, or with the tensor "
    "if its argument is a tensor"
)
def _(lab, s):
    lab.equal((1.0, 2.0), tuple(float(one) for one in lab.components(counting(s), s)))
    lab.equal(1, len(s.local_results(ops.ones(()))))
    found = s.local_results({"a": counting(s), "b": 5})
    lab.equal([1.0, 2.0], [float(lab.numpy(one["a"])) for one in found])
    lab.equal([5, 5], [one["b"] for one in found])


@behaviour(
    "`gather` of values with different numbers of axes raises an error",
    jax=(
        "The error is raised earlier, when the distributed value is made, because on JAX all "
        "replicas run one program."
    ),
)
def _(lab, s):
    with lab.raises(kd.errors.KerasdistError, "Expected (tensors|arrays|all replicas)"):
        value = numbered(s, lambda i: np.ones((1,) * (i + 1), "float32"))
        s.gather(value, axis=0)
    if lab.backend != "jax":
        with lab.raises((kd.errors.KerasdistError, ValueError), "Expected"):
            s.run(lambda x: kd.get_replica_context().all_gather(x, axis=0), args=(value,))
        lab.still_usable(s)


@behaviour(
    "In a replica, `all_reduce` and `all_gather` of a variable use the value that this replica "
    "reads"
)
def _(lab, s):
    own = variable_of(s, 2.0, synchronization="on_read", aggregation="sum", trainable=False)
    mirrored = variable_of(s, 2.0, aggregation="mean")

    def step():
        here = kd.get_replica_context()
        rows = here.all_gather(ops.reshape(mirrored, (1,)), axis=0)
        return here.all_reduce("SUM", mirrored), here.all_reduce("SUM", own), rows

    for run in (s.run, kd.function(s.run)):
        found = [lab.components(one, s) for one in run(step)]
        lab.equal([[4.0, 4.0], [4.0, 4.0], [[2.0, 2.0]] * 2], found)


@behaviour(
    "The gradient of an `all_gather` is the replica's rows of the summed gradient, for each tensor"
    " of a nested structure"
)
def _(lab, s):
    variable = variable_of(s, [[3.0], [5.0]])

    def step(by):
        def total():
            once, twice = kd.get_replica_context().all_gather([variable + 0.0, variable * 2.0], 1)
            return ops.sum(once * by) + ops.sum(twice * by)

        return kd.value_and_grad(total, [variable])[1][0]

    by = numbered(s, lambda i: np.float32([[1.0, 2.0]]) * (i + 1))
    # Of replica 0, (1 + 2) * 3: what both multiply its column by, once and twice.
    lab.equal([[[9.0]] * 2, [[18.0]] * 2], lab.components(s.run(step, args=(by,)), s))
