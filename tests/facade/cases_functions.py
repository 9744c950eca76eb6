"""`kd.function`."""

from functools import partial

import numpy as np

from tests.conformance.lazy import kd, keras, ops, tf
from tests.facade.case import case
from tests.facade.lab import numbered, variable_of


def batches(strategy, count=3):
    rows = np.arange(4, dtype="float32")
    return strategy.distribute_dataset([rows + index for index in range(count)])


def compiled_on(lab):
    """Whether the function's body runs once for all calls: PyTorch runs it as it is."""
    return lab.backend != "torch"


@case
def a_compiled_step_is_traced_once(lab, strategy):
    """A compiled step is not traced again for the same shapes (PyTorch runs it each time)."""
    v = variable_of(strategy, 1.0, aggregation="mean")
    bodies = {"outer": 0, "inner": 0}

    def step(x):
        bodies["inner"] += 1
        v.assign_add(ops.sum(x))
        return v * 2.0

    @kd.function
    def compiled(batch):
        bodies["outer"] += 1
        return strategy.reduce("SUM", strategy.run(step, args=(batch,)), axis=None)

    data = batches(strategy)
    for batch in data:
        compiled(batch)
    first = dict(bodies)
    for _ in range(3):
        for batch in data:
            compiled(batch)
    if compiled_on(lab):
        lab.equal(first, dict(bodies))
        # A first call may trace twice: once to find the variables.
        lab.check(bodies["outer"] <= 3, f"traced again and again, {bodies}")
    else:
        lab.equal({"outer": 12, "inner": 24}, bodies)
    # The mean over two replicas of the sums of their two rows: 3, 5 and 7 a round.
    lab.equal(1.0 + 4 * (3.0 + 5.0 + 7.0), v)


@case
def another_shape_is_another_trace(lab, strategy):
    """A compiled step gives the right numbers for a smaller last batch."""

    def total(batch):
        return strategy.reduce("SUM", strategy.run(ops.sum, args=(batch,)), axis=None)

    data = [np.arange(4, dtype="float32"), np.arange(3, dtype="float32"), np.float32([5.0])]
    batches = strategy.distribute_dataset(data)
    for step in (total, kd.function(total)):
        for _ in range(2):
            lab.equal([6.0, 3.0, 5.0], [step(batch) for batch in batches])


@case
def functions_in_functions(lab, strategy):
    """A compiled function may call another one, inside and outside of `run`."""
    v = variable_of(strategy, 1.0, aggregation="mean")

    @kd.function
    def innermost(x):
        v.assign_add(ops.sum(x))
        return x * 2.0

    @kd.function
    def inner(x):
        return strategy.run(innermost, args=(x,))

    @kd.function
    def outer(x):
        return strategy.reduce("SUM", inner(x), axis=0)

    for batch in batches(strategy, 2):
        lab.equal({6.0: 12.0, 10.0: 20.0}[float(lab.numpy(strategy.reduce("SUM", batch, 0)))],
                  outer(batch))  # fmt: skip
    lab.equal(1.0 + 3.0 + 5.0, v)


@case
def static_arguments(lab):
    """Texts, numbers and None are constants of a trace; arrays are traced by shape and type."""
    seen, bodies = [], []

    @kd.function
    def compiled(x, mode, scale=1, *, negate=False, extra=None):
        seen.append(mode)
        if mode == "double":
            x = x * 2.0
        if negate:
            x = -x
        return x * scale if extra is None else x + extra

    @kd.function
    def doubled(x):
        bodies.append(1)
        return ops.sum(x) * 2.0

    x = ops.convert_to_tensor([1.0, 2.0])
    for _ in range(2):
        lab.equal([2.0, 4.0], compiled(x, "double"))
        lab.equal([1.0, 2.0], compiled(x, "as it is"))
        lab.equal([-3.0, -6.0], compiled(x, "as it is", 3, negate=True))
        lab.equal([2.0, 3.0], compiled(x, "as it is", extra=x * 0.0 + 1.0))
    found = [doubled(np.float32([index, 1.0])) for index in range(4)]
    lab.equal([2.0, 4.0, 6.0, 8.0], found)
    if compiled_on(lab):
        lab.check(len(seen) <= 8, f"traced again and again: {seen}")
        lab.check(len(bodies) <= 2, f"traced for each value, {len(bodies)} times")


@case
def functions_of_plain_code(lab):
    """Without a strategy, a compiled function reads and writes variables, and takes nests."""
    v = keras.Variable([1.0, 2.0])

    @kd.function
    def compiled(nest):
        v.assign_add(nest["a"])
        return {"sum": ops.sum(v), "parts": (v + 0.0, [nest["b"]])}

    first = compiled({"a": ops.ones(2), "b": ops.zeros(1)})
    second = compiled({"a": ops.ones(2), "b": ops.zeros(1)})
    lab.equal({"sum": 5.0, "parts": [[2.0, 3.0], [[0.0]]]}, first)
    lab.equal({"sum": 7.0, "parts": [[3.0, 4.0], [[0.0]]]}, second)
    lab.equal([3.0, 4.0], v)

    @kd.function()
    def with_parentheses(x):
        return x + 1.0

    with_option = kd.function(jit_compile=False)(lambda x: x + 2.0)
    x = ops.convert_to_tensor(1.0)
    lab.equal([2.0, 3.0], [with_parentheses(x), with_option(x)])
    lab.equal("with_parentheses", with_parentheses.__name__)


@case(backends=("tensorflow",))
def a_replica_in_xla(lab):
    """XLA compiles the forward and backward pass that each replica runs in `run`."""
    strategy = lab.strategy()
    x = np.linspace(-1.0, 1.0, 12, dtype="float32").reshape(4, 3)
    with strategy.scope():
        v = keras.Variable(np.ones((3, 1), "float32"))
        optimizer = keras.optimizers.SGD(0.5)
        optimizer.build([v])

    def loss_and_gradients(x):
        return kd.value_and_grad(lambda: ops.sum(ops.square(ops.matmul(x, v))), [v])

    def losses(compiled):
        v.assign(np.ones((3, 1), "float32"))

        def step(x):
            loss, gradients = compiled(x)
            optimizer.apply(gradients, [v])
            return loss

        run = kd.function(lambda x: strategy.reduce("SUM", strategy.run(step, (x,)), axis=None))
        return [run(rows) for rows in strategy.distribute_dataset([x, x])]

    in_xla = tf.function(loss_and_gradients, jit_compile=True)
    lab.equal(losses(loss_and_gradients), losses(in_xla))


@case(backends=("tensorflow",))
def xla_around_a_run_is_refused(lab):
    """`jit_compile=True` is refused for a step of `run` and for a function around `run`."""
    strategy = lab.strategy()
    for compiles in (kd.function(jit_compile=True), partial(tf.function, jit_compile=True)):
        step = compiles(ops.sum)
        around = compiles(lambda: strategy.run(ops.sum, (tf.ones(3),)))
        for call in (
            lambda step=step: strategy.run(step, (tf.ones(3),)),
            tf.function(lambda step=step: strategy.run(step, (tf.ones(3),))),
            around,
            tf.function(lambda around=around: around()),
        ):
            with lab.raises(kd.errors.UnsupportedError, "Received: .* with jit_compile=True"):
                call()


@case
def an_error_in_a_compiled_function(lab, strategy):
    """An error in a compiled function keeps its type; variables can still be used."""
    v = variable_of(strategy, 1.0, aggregation="mean")
    wrong = [True]

    def step():
        v.assign(7.0)
        if wrong[0]:
            raise KeyError("of the user's")

    compiled = kd.function(lambda: strategy.run(step))
    with lab.raises(KeyError, "of the user's"):
        compiled()
    lab.check(np.isfinite(lab.numpy(v)), "the variable has a value, no leftover of a trace")
    wrong[0] = False
    compiled()
    lab.equal([7.0, 7.0], lab.components(v, strategy))
    lab.still_usable(strategy)


@case
def values_read_before_a_call_stay(lab, strategy):
    """Values that were read before a compiled step do not change after it."""
    v = variable_of(strategy, [1.0, 2.0], aggregation="mean")
    plain = keras.Variable([1.0, 2.0])

    @kd.function
    def compiled():
        plain.assign_add([1.0, 1.0])
        strategy.run(lambda: v.assign_add([1.0, 1.0]) is None)

    compiled()
    before = ops.copy(v), ops.copy(plain), v.numpy(), plain.numpy()
    kept = strategy.local_results(v)
    compiled()
    for one in before:
        lab.equal([2.0, 3.0], one)
    lab.equal([[3.0, 4.0]] * 2, lab.components(v, strategy))
    # Whatever a component is, a copy or the variable's own memory, it can still be read.
    lab.equal(2, len(lab.numpy(kept)))
    lab.equal([3.0, 4.0], plain)
    doubled = kd.function(lambda: strategy.run(lambda: ops.sum(v) * 2.0))
    lab.equal([14.0, 14.0], lab.components(doubled(), strategy))
    v.assign([5.0, 6.0])  # and what is assigned between two calls is seen
    lab.equal([22.0, 22.0], lab.components(doubled(), strategy))


@case
def methods_and_objects(lab, strategy):
    """A compiled method of a user's class works for each object of the class."""

    class Trainer:
        def __init__(self, factor):
            self.factor = factor
            with strategy.scope():
                self.model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])

        @kd.function
        def step(self, x):
            return strategy.run(self.replica_step, args=(self.model, x))

        def replica_step(self, model, x):
            return ops.sum(model(x)) * self.factor

    x = np.ones((4, 2), "float32")
    first, second = Trainer(1.0), Trainer(10.0)
    second.model.set_weights(first.model.get_weights())
    [batch] = strategy.distribute_dataset([x])
    for _ in range(2):
        one, other = (strategy.reduce("SUM", t.step(batch), axis=None) for t in (first, second))
        lab.check(abs(10 * float(one) - float(other)) < 1e-4, f"received {one} and {other}")


@case(refused={"tensorflow": ("ReplicaError", "Expected collectives.*directly in the step")})
def collectives_in_inner_functions(lab, strategy):
    """A compiled function called in a replica may call collectives, but not on TensorFlow."""

    @kd.function
    def inner(x):
        return kd.get_replica_context().all_reduce("SUM", x)

    def step(x):
        return inner(x) + x

    value = numbered(strategy, lambda i: np.float32(1.0 + i))
    outer = kd.function(lambda v: strategy.run(step, args=(v,)))
    for _ in range(2):
        lab.equal([4.0, 5.0], lab.components(outer(value), strategy))


@case
def a_model_built_in_a_compiled_step(lab, strategy):
    """A step that builds a model and optimizer in its first call makes mirrored variables."""
    x = np.random.default_rng(0).random((8, 2)).astype("float32")
    for compile_ in (kd.function, lambda function: function):
        with strategy.scope():
            layers = [keras.layers.Dense(3, activation="relu"), keras.layers.Dense(1)]
            model = keras.Sequential(layers)
            optimizer = keras.optimizers.SGD(0.01, momentum=0.9)

        def replica_step(x, model=model, optimizer=optimizer):
            model(x)
            variables = model.trainable_variables
            loss = lambda: ops.sum(ops.square(model(x, training=True) - 1.0)) / 8  # noqa: E731
            value, gradients = kd.value_and_grad(loss, variables)
            optimizer.apply(gradients, variables)
            return value

        step = compile_(
            lambda x, step=replica_step: strategy.reduce("SUM", strategy.run(step, (x,)), None)
        )
        data = strategy.distribute_dataset([x])
        values = [float(step(batch)) for _ in range(4) for batch in data]
        lab.check(values[-1] < values[0], f"the loss falls, received {values}")
        lab.equal(4, int(optimizer.iterations.numpy()))
        lab.equal(4, len(model.trainable_variables))
        for variable in model.trainable_variables:
            one, other = lab.components(variable, strategy)
            lab.equal(one, other)
            lab.check(strategy.extended.variable_created_in_scope(variable), "the strategy's")
