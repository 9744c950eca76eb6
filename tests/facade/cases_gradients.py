"""`kd.value_and_grad`."""

import numpy as np

from tests.conformance.lazy import kd, keras, ops
from tests.facade.case import case
from tests.facade.lab import numbered


@case(replicas=(1, 2))
def gradients_that_are_none_and_zero(lab):
    """None for a variable that was not read, zeros for one that was read without influence."""
    a, b, c = keras.Variable(2.0), keras.Variable([1.0, 1.0]), keras.Variable(3.0)

    def loss():
        return a * a + 0.0 * ops.sum(ops.stop_gradient(b))

    def check(value, gradients):
        lab.equal(4.0, value)
        lab.equal(4.0, gradients[0])
        lab.equal([0.0, 0.0], gradients[1])
        lab.check(gradients[2] is None, f"None, received {gradients[2]!r}")

    check(*kd.value_and_grad(loss, [a, b, c]))

    @kd.function
    def compiled():
        value, gradients = kd.value_and_grad(loss, [a, b, c])
        lab.check(gradients[2] is None, "None in a compiled function")
        return value, gradients[:2]

    for _ in range(2):
        value, [first, second] = compiled()
        check(value, [first, second, None])


@case
def gradients_in_replicas(lab, strategy):
    """In `run`, compiled and not: each replica's own gradient, None and zeros likewise."""
    with strategy.scope():
        used, idle, unread = keras.Variable(2.0), keras.Variable(1.0), keras.Variable(1.0)

    def step(x):
        def loss():
            return x * used * used + 0.0 * ops.stop_gradient(idle * 1.0)

        value, gradients = kd.value_and_grad(loss, [used, idle, unread])
        if gradients[2] is not None:
            raise AssertionError("None for a variable that was not read")
        return value, gradients[0], gradients[1]

    x = numbered(strategy, lambda i: np.float32(1.0 + i))
    for run in (strategy.run, kd.function(lambda fn, args: strategy.run(fn, args=args))):
        value, first, second = run(step, args=(x,))
        lab.equal([4.0, 8.0], lab.components(value, strategy))
        lab.equal([4.0, 8.0], lab.components(first, strategy))
        lab.equal([0.0, 0.0], lab.components(second, strategy))


@case
def has_aux(lab):
    """A function may return more beside its value, of any form."""
    v = keras.Variable(3.0)

    def loss():
        return v * v, {"twice": v * 2.0, "text": "word", "more": [1, None]}

    (value, aux), [gradient] = kd.value_and_grad(loss, [v], has_aux=True)
    lab.equal([9.0, 6.0, 6.0], [value, gradient, aux["twice"]])
    lab.equal(["word", [1, None]], [aux["text"], aux["more"]])
    strategy = lab.strategy()
    with strategy.scope():
        w = keras.Variable(3.0)

    def step():
        (value, aux), [gradient] = kd.value_and_grad(
            lambda: (w * w, (w * 2.0, "word")), [w], has_aux=True
        )
        return value, aux[0], gradient

    for function in (step, kd.function(step)):
        found = [lab.components(one, strategy) for one in strategy.run(function)]
        lab.equal([[9.0, 9.0], [6.0, 6.0], [6.0, 6.0]], found)


@case
def gradients_of_gradients(lab):
    """Nested: a second derivative, outside of functions and in them."""
    v = keras.Variable(2.0)

    def first():
        _, [gradient] = kd.value_and_grad(lambda: v * v * v, [v])
        return gradient

    def second():
        value, [gradient] = kd.value_and_grad(first, [v])
        return value, gradient

    lab.equal([12.0, 12.0], second())
    lab.equal([12.0, 12.0], kd.function(second)())
    strategy = lab.strategy()
    with strategy.scope():
        w = keras.Variable(2.0)

    def step():
        inner = lambda: kd.value_and_grad(lambda: w * w * w, [w])[1][0]  # noqa: E731
        value, [gradient] = kd.value_and_grad(inner, [w])
        return value, gradient

    found = [lab.components(one, strategy) for one in strategy.run(step)]
    lab.equal([[12.0, 12.0]] * 2, found)


@case
def what_the_function_assigns_stays(lab):
    """Moving statistics and counters that the function writes persist, in and out of steps."""
    counter = keras.Variable(0.0, trainable=False)
    v = keras.Variable(2.0)

    def loss():
        counter.assign_add(1.0)
        return v * counter

    value, [gradient] = kd.value_and_grad(loss, [v])
    lab.equal([2.0, 1.0, 1.0], [value, gradient, counter])
    value, [gradient] = kd.function(lambda: kd.value_and_grad(loss, [v]))()
    lab.equal([4.0, 2.0, 2.0], [value, gradient, counter])
    strategy = lab.strategy()
    with strategy.scope():
        w, seen = keras.Variable(2.0), keras.Variable(0.0, trainable=False, aggregation="mean")

    def step():
        def loss():
            seen.assign_add(1.0)
            return w * seen

        return kd.value_and_grad(loss, [w])[1][0]

    lab.equal([1.0, 1.0], lab.components(strategy.run(step), strategy))
    lab.equal([2.0, 2.0], lab.components(kd.function(lambda: strategy.run(step))(), strategy))
    lab.equal([2.0, 2.0], lab.components(seen, strategy))


@case
def what_is_differentiated(lab):
    """No variables, one that is named twice or not trainable, a constant, each type, an error."""
    value, gradients = kd.value_and_grad(lambda: ops.convert_to_tensor(3.0), [])
    lab.equal([3.0, []], [value, gradients])
    v = keras.Variable(3.0)
    lab.equal([6.0, 6.0], kd.value_and_grad(lambda: v * v, [v, v])[1])
    value, [gradient] = kd.value_and_grad(lambda: ops.convert_to_tensor(3.0), [v])
    lab.equal(3.0, value)
    lab.check(gradient is None, f"None, received {gradient!r}")
    fixed = keras.Variable(3.0, trainable=False)
    value, [gradient] = kd.value_and_grad(lambda: fixed * fixed, [fixed])
    lab.equal([9.0, 6.0], [value, gradient])
    for dtype in ("float32", "float16", "bfloat16"):
        one = keras.Variable(np.ones((2, 1)), dtype=dtype)
        _, [gradient] = kd.value_and_grad(lambda one=one: ops.sum(one * one), [one])
        lab.equal(dtype, keras.backend.standardize_dtype(gradient.dtype))
        lab.equal([[2.0], [2.0]], ops.cast(gradient, "float32"))

    def wrong():
        raise KeyError("of the user's")

    with lab.raises(KeyError, "of the user's"):
        kd.value_and_grad(wrong, [v])
    lab.equal(6.0, kd.value_and_grad(lambda: v * v, [v])[1][0])


@case
def values_that_are_no_scalar(lab):
    """What is differentiated is a scalar; anything else is refused with a word on what to do."""
    v = keras.Variable([1.0, 2.0])
    with lab.raises((ValueError, TypeError), "Expected.*scalar.*Received"):
        kd.value_and_grad(lambda: v * v, [v])
    with lab.raises(
        (ValueError, TypeError), "Expected.*pair.*Received|Expected.*has_aux.*Received"
    ):
        kd.value_and_grad(lambda: ops.sum(v), [v], has_aux=True)
    lab.equal([2.0, 4.0], kd.value_and_grad(lambda: ops.sum(v * v), [v])[1][0])


@case
def gradients_of_models_with_state(lab):
    """BatchNormalization and Dropout inside: moving statistics and seeds move once a call."""
    model = keras.Sequential(
        [keras.Input((3,)), keras.layers.BatchNormalization(), keras.layers.Dropout(0.5, seed=1)]
    )
    twin = keras.models.clone_model(model)
    x = np.random.default_rng(0).random((6, 3)).astype("float32")
    forward = lambda m: ops.sum(m(x, training=True))  # noqa: E731
    value, gradients = kd.value_and_grad(lambda: forward(model), model.trainable_variables)
    expected = forward(twin)
    lab.check(abs(float(value) - float(expected)) < 1e-5, "the value is that of the model")
    lab.equal(2, sum(one is not None for one in gradients))
    for ours, theirs in zip(model.variables, twin.variables, strict=True):
        lab.equal(lab.numpy(theirs), ours)


@case(replicas=(2, 3))
def next_values_in_the_place_of_gradients(lab, strategy):
    """Of a variable with `overwrite_with_gradient`, as float8 scales, the largest counts."""
    with strategy.scope():
        scale, weight = keras.Variable(0.5), keras.Variable(10.0)
        scale.overwrite_with_gradient = True
        optimizer = keras.optimizers.SGD(1.0)
        optimizer.build([scale, weight])

    def step(x):
        optimizer.apply([x, x], [scale, weight])

    values = numbered(strategy, lambda i: np.float32(1.0 + i))
    strategy.run(step, args=(values,))
    lab.equal([float(lab.replicas)] * lab.replicas, lab.components(scale, strategy))
    total = lab.replicas * (lab.replicas + 1) / 2
    lab.equal([10.0 - total] * lab.replicas, lab.components(weight, strategy))


@case
def collectives_in_custom_gradients(lab, strategy):
    """A `keras.ops.custom_gradient` whose backward pass calls a collective."""
    with strategy.scope():
        variable = keras.Variable(3.0)

    @ops.custom_gradient
    def scaled(x):
        def gradient(*args, upstream=None):
            upstream = args[-1] if upstream is None else upstream
            replica = kd.get_replica_context()
            rank = ops.cast(replica.replica_id_in_sync_group, "float32")
            return upstream * replica.all_reduce(kd.ReduceOp.SUM, 1.0 + rank)

        return 2.0 * x, gradient

    value, [gradient] = strategy.run(
        lambda: kd.value_and_grad(lambda: scaled(variable * 1.0), [variable])
    )
    lab.equal([6.0] * lab.replicas, lab.components(value, strategy))
    total = sum(range(1, lab.replicas + 1))
    lab.equal([float(total)] * lab.replicas, lab.components(gradient, strategy))
