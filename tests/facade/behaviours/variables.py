"""Variables that are made, read and assigned in each context."""

import copy
from functools import partial

import numpy as np

from tests.conformance.lazy import kd, keras, ops
from tests.facade.behaviours import behaviour
from tests.facade.lab import numbered, variable_of

ONE_COPY = "Replicas of `CentralStorageStrategy` share one copy, as in `tf.distribute`."


def counting(s):
    """1.0, 2.0, ..., one a replica."""
    return numbered(s, lambda i: np.float32(i + 1))


def on_read(s, aggregation, value=0.0):
    options = {"synchronization": "on_read", "aggregation": aggregation, "trainable": False}
    return variable_of(s, value, **options)


def assigned(s, variable, method="assign"):
    step = lambda x: getattr(variable, method)(x) is None  # noqa: E731
    s.run(step, args=(counting(s),))
    return variable


@behaviour("A variable made in a scope is a Keras variable, with a copy for each replica")
def _(lab, s):
    variable = variable_of(s, [1.0, 2.0])
    lab.check(isinstance(variable, keras.Variable), "a keras.Variable")
    lab.equal([[1.0, 2.0]] * 2, lab.components(variable, s))
    lab.check(s.extended.variable_created_in_scope(variable), "made in the scope")


@behaviour("A random initial value is the same in all replicas")
def _(lab, s):
    with s.scope():
        variable = keras.Variable(keras.initializers.RandomNormal(), shape=(4,))
    first, second = lab.components(variable, s)
    lab.equal(first, second)


@behaviour(
    "A variable has the shape, type, name and `trainable` of the arguments with which it was made"
)
def _(lab, s):
    variable = variable_of(s, np.ones((2, 3)), dtype="float32", trainable=False, name="kept")
    lab.equal(((2, 3), "float32", "kept", False), (
        tuple(variable.shape), variable.dtype, variable.name, variable.trainable
    ))  # fmt: skip


@behaviour("The weights of a layer have the same paths inside and outside of a scope")
def _(lab, s):
    def paths():
        keras.backend.clear_session()
        layer = keras.layers.Dense(2)
        layer.build((None, 3))
        return [one.path for one in layer.weights]

    outside = paths()
    with s.scope():
        lab.equal(outside, paths())


@behaviour("Operators and `keras.ops` functions read a variable, inside and outside of replicas")
def _(lab, s):
    v = variable_of(s, 2.0)

    def results():
        values = v + 1.0, 1.0 + v, v - 1.0, 1.0 - v, v * 3.0, v / 2.0, -v, v**2, ops.square(v)
        return ops.stack([ops.convert_to_tensor(one) for one in values])

    expected = np.float32([3, 3, 1, -1, 6, 1, -2, 4, 4])
    lab.equal(expected, results())
    with s.scope():
        lab.equal(expected, results())
    lab.equal([expected] * 2, lab.components(s.run(results), s))


@behaviour("Comparisons, matrix products and indexing read a variable")
def _(lab, s):
    v = variable_of(s, [[1.0, 2.0], [3.0, 4.0]])

    def results():
        return ops.sum(ops.cast(v > 2.0, "float32")), (v @ v)[0, 0], v[1, 0]

    lab.equal([2.0, 7.0, 3.0], [lab.numpy(one) for one in results()])
    lab.equal([3.0, 3.0], lab.components(s.run(results)[2], s))


@behaviour("`numpy()`, `float` and `ops.convert_to_numpy` read a variable")
def _(lab, s):
    v = variable_of(s, 2.5)
    lab.equal(2.5, np.asarray(v.numpy()))
    lab.equal(2.5, float(v))
    lab.equal(2.5, ops.convert_to_numpy(v))


@behaviour(
    "`assign`, `assign_add` and `assign_sub` outside of replicas change every copy of a variable"
)
def _(lab, s):
    for in_scope in (True, False):
        v = variable_of(s, 1.0)

        def change(v=v):
            v.assign(5.0)
            v.assign_add(2.0)
            v.assign_sub(1.0)

        if in_scope:
            with s.scope():
                change()
        else:
            change()
        lab.equal([6.0, 6.0], lab.components(v, s))


@behaviour(
    "A compiled function outside of replicas can assign to a variable, and then reads the new value"
)
def _(lab, s):
    v = variable_of(s, 1.0)

    def change(x):
        v.assign(x)
        v.assign_add(1.0)
        return v + 0.0

    lab.equal(8.0, kd.function(change)(ops.convert_to_tensor(7.0)))
    lab.equal([8.0, 8.0], lab.components(v, s))


@behaviour(
    "Assigning a value of another shape raises a ValueError, and does not change the variable"
)
def _(lab, s):
    v = variable_of(s, [1.0, 2.0])
    with lab.raises(ValueError, "shape"):
        v.assign([1.0, 2.0, 3.0])
    lab.equal([[1.0, 2.0]] * 2, lab.components(v, s))


@behaviour(
    "`aggregation` (sum, mean, only_first_replica) says how the values that replicas assign are "
    "combined"
)
def _(lab, s):
    for aggregation, expected in (("sum", 3.0), ("mean", 1.5), ("only_first_replica", 1.0)):
        v = assigned(s, variable_of(s, 0.0, aggregation=aggregation))
        lab.equal([expected] * 2, lab.components(v, s))


NEW_VALUES = (
    "kerasdist combines the new values, as Keras 3 does; `tf.distribute` combines the changes."
)


@behaviour(
    "`assign_add` and `assign_sub` in replicas combine the new values",
    tensorflow=NEW_VALUES,
    jax=NEW_VALUES,
    torch=NEW_VALUES,
)
def _(lab, s):
    v = assigned(s, variable_of(s, 10.0, aggregation="mean"), "assign_add")
    lab.equal([11.5, 11.5], lab.components(v, s))
    v = assigned(s, variable_of(s, 10.0, aggregation="sum"), "assign_sub")
    lab.equal([17.0, 17.0], lab.components(v, s))


@behaviour(
    "Without aggregation each copy has the value that its replica assigned, and other code reads "
    "the first copy"
)
def _(lab, s):
    v = assigned(s, variable_of(s, 0.0))
    lab.equal([1.0, 2.0], lab.components(v, s))
    lab.equal(1.0, v)


@behaviour(
    "After an assignment a replica reads its own value or, if the variable has an aggregation, the"
    " combined value"
)
def _(lab, s):
    own, common = variable_of(s, 0.0), variable_of(s, 0.0, aggregation="sum")

    def step(x):
        own.assign(x)
        common.assign(x)
        return own * 10.0 + common

    lab.equal([13.0, 23.0], lab.components(s.run(step, args=(counting(s),)), s))


@behaviour(
    "`on_read`: each replica has its own value; code outside of replicas reads the sum, the mean "
    "or the first value"
)
def _(lab, s):
    for aggregation, expected in (("sum", 3.0), ("mean", 1.5), ("only_first_replica", 1.0)):
        v = assigned(s, on_read(s, aggregation))
        lab.equal([1.0, 2.0], lab.components(v, s))
        lab.equal(expected, v)
        with s.scope():
            lab.equal(expected, s.extended.read_var(v))


@behaviour(
    "`on_read`: a value assigned outside of replicas is divided among the copies if the "
    "aggregation is a sum; otherwise each copy gets this value"
)
def _(lab, s):
    for aggregation, share in (("sum", 3.0), ("mean", 6.0), ("only_first_replica", 6.0)):
        v = on_read(s, aggregation)
        v.assign(6.0)
        lab.equal([share] * 2, lab.components(v, s))
        lab.equal(6.0, v)


@behaviour(
    "`on_read` integers whose aggregation is a sum: code outside of replicas reads the integer "
    "that it assigned, even if the copies cannot divide it evenly"
)
def _(lab, s):
    v = variable_of(
        s, 0, dtype="int32", synchronization="on_read", aggregation="sum", trainable=False
    )
    v.assign(7)
    lab.equal(7, v)


@behaviour(
    "`on_read` without aggregation: a replica reads its own value; reading outside of replicas "
    "raises a ValueError"
)
def _(lab, s):
    v = assigned(s, on_read(s, "none"))
    lab.equal([1.0, 2.0], lab.components(s.run(lambda: v + 0.0), s))
    with lab.raises(ValueError, "aggregation"):
        lab.numpy(v + 0.0)


@behaviour(
    "`synchronization='none'` in the scope of a strategy with several replicas raises a ValueError"
)
def _(lab, s):
    with lab.raises(ValueError, "synchronization"):
        variable_of(s, 1.0, synchronization="none")


@behaviour("An unknown name of `synchronization` or `aggregation` raises a ValueError")
def _(lab, s):
    for options in ({"aggregation": "max"}, {"synchronization": "sometimes"}):
        with lab.raises(ValueError, "Invalid value|Expected"):
            variable_of(s, 1.0, **options)


@behaviour(
    "`on_read` under `CentralStorageStrategy`: code outside of replicas reads the sum of the "
    "values that replicas add",
    tensorflow=f"{ONE_COPY} Each replica adds its value to this copy, which is what is read.",
    jax="Each replica has a value of its own, as under `MirroredStrategy`.",
    torch="Each replica has a value of its own, as under `MirroredStrategy`.",
)
def _(lab, s):
    central = kd.CentralStorageStrategy(lab.devices)
    v = assigned(central, on_read(central, "sum"), "assign_add")
    lab.equal(3.0, v)
    assigned(central, v, "assign_add")
    lab.equal(6.0, v)
    copies = [6.0] if lab.backend == "tensorflow" else [2.0, 4.0]
    lab.equal(copies, lab.components(v, central))


@behaviour(
    "`CentralStorageStrategy` combines the values that replicas assign in the same way as "
    "`MirroredStrategy`"
)
def _(lab, s):
    central = kd.CentralStorageStrategy(lab.devices)
    for method, expected in (("assign", 3.0), ("assign_add", 23.0), ("assign_sub", 17.0)):
        v = variable_of(central, 10.0, aggregation="sum")
        lab.equal(expected, assigned(central, v, method))


@behaviour(
    "`extended.update` calls its function for each copy of the variable, with the copy and the "
    "arguments"
)
def _(lab, s):
    v = variable_of(s, 1.0)
    with s.scope():
        s.extended.update(v, lambda v, x, y: v.assign(x + y), args=(2.0,), kwargs={"y": 3.0})
    lab.equal([5.0, 5.0], lab.components(v, s))


@behaviour(
    "`extended.update` passes each copy its component of a distributed argument; with "
    "`group=False` it returns one result per copy"
)
def _(lab, s):
    v = variable_of(s, 1.0)
    with s.scope():
        s.extended.update(v, lambda v, x: v.assign_add(x), args=(counting(s),))
        found = s.extended.update(v, lambda v: 7.0, group=False)
    lab.equal([2.0, 3.0], lab.components(v, s))
    lab.equal([7.0, 7.0], found)


@behaviour("`extended.update` refuses a variable that was made outside of the scope")
def _(lab, s):
    outside = keras.Variable(1.0)
    with s.scope(), lab.raises(RuntimeError, "Expected a variable that was made"):
        s.extended.update(outside, lambda v: None)


@behaviour("`extended.colocate_vars_with` refuses a variable that was made outside of the scope")
def _(lab, s):
    first, outside = variable_of(s, 1.0), keras.Variable(1.0)
    with s.extended.colocate_vars_with(first):
        second = keras.Variable(2.0)
    lab.equal([2.0, 2.0], lab.components(second, s))
    with lab.raises(ValueError, "Expected a variable that was made"):
        s.extended.colocate_vars_with(outside)


@behaviour(
    "A variable that the first call of a step makes belongs to the strategy, and is made only once"
)
def _(lab, s):
    made = []

    def step():
        if not made:
            made.append(keras.Variable(3.0, aggregation="sum"))
        return made[0] + 0.0

    for _ in range(2):
        lab.equal([3.0, 3.0], lab.components(s.run(step), s))
    lab.equal([3.0, 3.0], lab.components(made[0], s))


@behaviour("All replicas can read a variable that was made outside of every scope")
def _(lab, s):
    outside = keras.Variable(4.0)
    lab.equal([4.0, 4.0], lab.components(s.run(lambda: outside + 0.0), s))


@behaviour(
    "A boolean or integer variable with the aggregation only_first_replica takes the first "
    "replica's value"
)
def _(lab, s):
    for dtype, value in (("bool", True), ("int32", 5)):
        options = {"dtype": dtype, "aggregation": "only_first_replica", "trainable": False}
        v = variable_of(s, 0, **options)
        s.run(lambda v=v, value=value: v.assign(value) is None)
        lab.equal([value] * 2, [one.item() for one in lab.components(v, s)])


@behaviour(
    "If replicas assign to an integer variable with the aggregation mean, or to a boolean variable"
    " with sum, an error is raised"
)
def _(lab, s):
    for dtype, aggregation in (("int32", "mean"), ("bool", "sum")):
        options = {"dtype": dtype, "aggregation": aggregation, "trainable": False}
        with lab.raises((ValueError, TypeError), "Expected|non-floating"):
            v = variable_of(s, 1, **options)
            s.run(lambda v=v: v.assign(1) is None)


@behaviour("The weights of a frozen layer are not in `trainable_variables`, but stay in `weights`")
def _(lab, s):
    with s.scope():
        layer = keras.layers.Dense(1)
        layer.build((None, 1))
        layer.trainable = False
    lab.equal((0, 2), (len(layer.trainable_variables), len(layer.weights)))


@behaviour("A counter that every replica increases by one has the same value as on one device")
def _(lab, s):
    v = variable_of(s, 0, dtype="int32", trainable=False)
    for _ in range(3):
        s.run(lambda: v.assign_add(1) is None)
    lab.equal(3, v)


COMBINED = "`tf.distribute` returns the combined value; Keras 3 returns the assigned value."


@behaviour(
    "`assign` returns the assigned value; in a replica this is the value that the replica assigned",
    tensorflow=COMBINED,
    jax=COMBINED,
    torch=COMBINED,
)
def _(lab, s):
    v = variable_of(s, 15.0, aggregation="sum")
    found = s.run(lambda x: (v.assign(x), v.assign_add(x)), args=(counting(s),))
    lab.equal([[1.0, 2.0], [4.0, 5.0]], [lab.components(one, s) for one in found])
    lab.equal([9.0, 9.0], lab.components(v, s))
    with s.scope():
        lab.equal([8.0, 7.0], [lab.numpy(one) for one in (v.assign(8.0), v.assign_sub(1.0))])


@behaviour("The argument of `assign`, `assign_add` and `assign_sub` may be another variable")
def _(lab, s):
    source = variable_of(s, 2.0, aggregation="mean")
    for aggregation, in_replicas in (("none", 2.0), ("mean", 2.0), ("sum", 4.0)):
        v = variable_of(s, 0.0, aggregation=aggregation)
        s.run(lambda v=v: v.assign(source) is None)
        lab.equal([in_replicas] * 2, lab.components(v, s))
        v.assign_add(source)
        v.assign_sub(source)
        lab.equal([in_replicas] * 2, lab.components(v, s))


@behaviour(
    "An assigned value is converted to the type of the variable, inside and outside of replicas"
)
def _(lab, s):
    real = variable_of(s, 0.0, aggregation="mean")
    whole = variable_of(s, 0, dtype="int32", trainable=False, aggregation="only_first_replica")
    s.run(lambda: (real.assign(1) is None, whole.assign(1.7) is None))
    lab.equal([[1.0, 1.0], [1, 1]], [lab.components(one, s) for one in (real, whole)])
    real.assign_add(2)
    lab.equal([3.0, 3.0], lab.components(real, s))


ADDS = (
    "The argument changes the value that is read; `tf.distribute` raises an error if the "
    "aggregation is a sum."
)


@behaviour(
    "`on_read`: `assign_add` and `assign_sub` outside of replicas",
    tensorflow=ADDS,
    jax=ADDS,
    torch=ADDS,
)
def _(lab, s):
    for aggregation, share in (("sum", 2.5), ("mean", 3.0), ("only_first_replica", 3.0)):
        v = on_read(s, aggregation, 2.0)  # of a sum 4.0 is read
        v.assign_add(2.0)
        v.assign_sub(1.0)
        lab.equal([share] * 2, lab.components(v, s))


@behaviour(
    "Integer variables support division, remainders, bitwise operators, signs, and comparisons "
    "from either side"
)
def _(lab, s):
    v = variable_of(s, 7, dtype="int32", trainable=False)

    def results():
        whole = v // 2, 15 // v, v % 2, 16 % v, v & 3, 3 & v, v | 8, 16 | v, v ^ 3, -v, ~v, abs(v)
        truths = v < 12, v <= 7, v > 12, v >= 7, 12 < v, 12 > v, v == 7, v != 7  # noqa: SIM300
        return ops.stack(
            [ops.cast(ops.convert_to_tensor(one), "int32") for one in (*whole, *truths)]
        )

    # `|` and `^` are logical ones in Keras.
    expected = lab.numpy(results())
    lab.equal([3, 2, 1, 2], expected[:4])
    lab.equal([-7, -8, 7, 1, 1, 0, 1, 0, 1, 1, 0], expected[9:])
    lab.equal([expected] * 2, lab.components(s.run(results), s))


@behaviour(
    "If the copies of a variable differ, `extended.update` reads and changes each copy separately"
)
def _(lab, s):
    v = variable_of(s, 0.0)
    update = partial(s.extended.update, v)

    def change():
        update(lambda v, x: v.assign(x), args=(counting(s),))
        update(lambda v, by: v.assign_sub(by), args=(0.5,))
        return update(lambda v: v.assign_add(v.value + v), group=False)

    def merging(x):
        v.assign(x)
        kd.get_replica_context().merge_call(
            lambda _: update(lambda v: v.assign_add(v * 9.0)) is None
        )
        return v + 0.0

    for wrap in (lambda act: act, kd.function):
        lab.equal([1.5, 4.5], [lab.numpy(one) for one in wrap(change)()])
        lab.equal([1.5, 4.5], lab.components(v, s))
        assigned(s, v)
        wrap(lambda: update(lambda v: v.assign_add(v * 1.0)))()
        lab.equal([2.0, 4.0], lab.components(v, s))
        found = wrap(lambda: s.run(merging, args=(counting(s),)))()
        lab.equal([10.0, 20.0], lab.components(found, s))


@behaviour(
    "If each replica assigns the result of `ops.scatter_update`, the results are combined by the "
    "variable's aggregation"
)
def _(lab, s):
    v = variable_of(s, [0.0, 0.0, 0.0], aggregation="mean")

    def step(row):
        v.assign(ops.scatter_update(v, ops.reshape(row, (1, 1)), ops.ones((1,))))
        return v + 0.0

    found = s.run(step, args=(numbered(s, np.int32),))
    lab.equal([[0.5, 0.5, 0.0]] * 2, lab.components(found, s))


@behaviour("If a step returns a variable, `run` returns the same object")
def _(lab, s):
    v = variable_of(s, 1.0)
    lab.check(s.run(lambda: v) is v and s.run(lambda: (v, [v]))[1][0] is v, "itself")


@behaviour(
    "A deep copy of a variable is a new variable with the same aggregation, inside and outside of "
    "the scope"
)
def _(lab, s):
    v = variable_of(s, 1.0, aggregation="sum")
    with s.scope():
        inside = copy.deepcopy(v)
    outside = copy.deepcopy(v)
    assigned(s, inside)
    lab.equal([[1.0] * 2, [3.0] * 2], [lab.components(one, s) for one in (v, inside)])
    lab.equal(("sum", 1.0), (outside.aggregation, float(outside)))


PORTABLE = "This raises a ValueError: make weights in the first call of a step, or outside of it."


@behaviour("A step makes a new layer in each call", jax=PORTABLE, torch=PORTABLE)
def _(lab, s):
    def step(x):
        layer = keras.layers.Dense(1)
        layer(x)
        return layer.kernel + 0.0

    x = numbered(s, lambda _: np.ones((1, 1), "float32"))
    if lab.backend == "tensorflow":
        first, second = lab.components(s.run(step, args=(x,)), s)
        lab.equal(first, second)
    else:
        with lab.raises(ValueError, "in its first call only.*dense.*Make them outside"):
            s.run(step, args=(x,))
    lab.still_usable(s)
