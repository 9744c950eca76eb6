"""`kd.value_and_grad`."""

import numpy as np

from tests.conformance.lazy import kd, keras, ops
from tests.facade.case import case
from tests.facade.lab import numbered, variable_of


def everywhere(lab, make):
    """What a step returns outside of every strategy and on each replica, compiled or not.

    ``make`` makes its variables, and returns it.
    """
    for strategy in kd.get_strategy(), lab.strategy():
        with strategy.scope():
            step = make()
        for run in (strategy.run, kd.function(strategy.run)):
            yield from map(lab.numpy, strategy.experimental_local_results(run(step)))


@case
def gradients_that_are_none_and_zero(lab):
    """A gradient is None for an unread variable, and zeros for one without influence."""

    def make():
        a, b, c = keras.Variable(2.0), keras.Variable([1.0, 1.0]), keras.Variable(3.0)

        def step():
            loss = lambda: a * a + 0.0 * ops.sum(ops.stop_gradient(b * 1.0))  # noqa: E731
            value, [used, idle, unread] = kd.value_and_grad(loss, [a, b, c])
            lab.check(unread is None, f"None, received {unread!r}")
            return value, used, idle

        return step

    for found in everywhere(lab, make):
        lab.equal([4.0, 4.0, [0.0, 0.0]], found)


@case
def has_aux(lab):
    """With `has_aux=True`, the function also returns any nested structure."""

    def make():
        v = keras.Variable(3.0)

        def step():
            loss = lambda: (v * v, {"twice": v * 2.0, "text": "word", "more": [1, None]})  # noqa: E731
            (value, aux), [gradient] = kd.value_and_grad(loss, [v], has_aux=True)
            lab.equal(["word", [1, None]], [aux["text"], aux["more"]])
            return value, gradient, aux["twice"]

        return step

    for found in everywhere(lab, make):
        lab.equal([9.0, 6.0, 6.0], found)


@case
def gradients_of_gradients(lab):
    """`value_and_grad` inside of `value_and_grad` gives a second derivative."""

    def make():
        v = keras.Variable(2.0)
        first = lambda: kd.value_and_grad(lambda: v * v * v, [v])[1][0]  # noqa: E731
        return lambda: kd.value_and_grad(first, [v])

    for value, [gradient] in everywhere(lab, make):
        lab.equal([12.0, 12.0], [value, gradient])


@case
def what_the_function_assigns_stays(lab):
    """Variables keep what a differentiated function assigns to them."""
    counters = []

    def make():
        v, seen = keras.Variable(2.0), keras.Variable(0.0, trainable=False, aggregation="mean")
        counters.append(seen)

        def loss():
            seen.assign_add(1.0)
            return v * seen

        return lambda: kd.value_and_grad(loss, [v])

    found = [[value, gradient] for value, [gradient] in everywhere(lab, make)]
    # Outside, and on two replicas: a first call and a second one.
    lab.equal([[2.0, 1.0], [4.0, 2.0], *[[2.0, 1.0]] * 2, *[[4.0, 2.0]] * 2], found)
    lab.equal([2.0, 2.0], counters)


@case
def what_is_differentiated(lab):
    """Edge cases: no variables, one named twice, not trainable, a constant loss, an error."""
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
    """The differentiated value must be a scalar; the error says what to do."""
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
    """Moving statistics and seeds advance once per call of `value_and_grad`."""
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
    """A variable with `overwrite_with_gradient` gets the largest of the replicas' values."""
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
    """The backward pass of a `keras.ops.custom_gradient` may call a collective."""
    variable = variable_of(strategy, 3.0)

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
