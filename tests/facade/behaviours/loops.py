"""What custom training loops give to `run`, do in it, and get back."""

import functools

import numpy as np

from tests.conformance.lazy import kd, keras, ops
from tests.facade.behaviours import behaviour
from tests.facade.lab import FLOAT32, numbered, variable_of

X = np.float32([[1.0], [2.0], [3.0], [4.0]])
Y = np.float32([[2.0], [4.0], [6.0], [8.0]])


def dense(s, optimizer=None, **options):
    with s.scope():
        layer = keras.layers.Dense(1, kernel_initializer="ones", use_bias=False, **options)
        layer.build((None, 1))
        optimizer = optimizer() if optimizer else keras.optimizers.SGD(0.1)
        optimizer.build(layer.trainable_variables)
    return layer, optimizer


def training_step(layer, optimizer, size=4):
    """One step of a loop on a replica's part of a batch of so many rows; returns its loss."""

    def step(batch):
        x, y = batch

        def loss():
            squares = ops.square(layer(x) - y)[:, 0]
            extra = sum(layer.losses, 0.0)
            return kd.compute_average_loss(squares, global_batch_size=size) + (
                kd.scale_regularization_loss(extra) if layer.losses else 0.0
            )

        value, gradients = kd.value_and_grad(loss, layer.trainable_variables)
        optimizer.apply(gradients, layer.trainable_variables)
        return value

    return step


def trained(strategy, epochs=2, compiled=True, batches=None, size=4, **options):
    """The kernel after a loop over batches."""
    layer, optimizer = dense(strategy, **options)
    step = training_step(layer, optimizer, size)
    run = kd.function(strategy.run) if compiled else strategy.run
    for _ in range(epochs):
        for batch in strategy.distribute_dataset(batches or [(X, Y)]):
            run(step, args=(batch,))
    return layer.kernel


def same(lab, s, **options):
    """A loop gives the same results on several replicas as on one."""
    lab.equal(trained(kd.get_strategy(), compiled=False, **options), trained(s, **options), FLOAT32)


@behaviour(
    "The function of `run` may have no arguments; strings, numbers, None and booleans are passed "
    "on unchanged"
)
def _(lab, s):
    lab.equal([1.0, 1.0], lab.components(s.run(lambda: ops.ones(())), s))
    seen = []
    given = ("a", None, True), {"b": 2}
    s.run(lambda *args, **kwargs: seen.append((args, kwargs)), *given)
    lab.check(seen and all(one == given for one in seen), f"{seen}")


@behaviour("Positional and keyword arguments of `run` may be nested structures")
def _(lab, s):
    value = numbered(s, lambda i: np.float32(i + 1))

    def step(first, *, second):
        return first["x"][0] * 10.0 + second[1]

    found = s.run(step, args=({"x": [value]},), kwargs={"second": (0.0, value)})
    lab.equal([11.0, 22.0], lab.components(found, s))


@behaviour("A step may be a lambda, a method, a partial, or any callable object")
def _(lab, s):
    class Step:
        def __call__(self, x):
            return x + 1.0

        def method(self, x):
            return x + 2.0

    value = numbered(s, np.float32)
    for step, first in (
        (Step(), 1.0), (Step().method, 2.0), (functools.partial(lambda y, x: x + y, 3.0), 3.0)
    ):  # fmt: skip
        lab.equal([first, first + 1.0], lab.components(s.run(step, args=(value,)), s))


@behaviour("If a step returns nothing, `run` returns None; nested structures keep their form")
def _(lab, s):
    lab.check(s.run(lambda: None) is None, "None")
    found = s.run(lambda: {"a": (ops.ones(()), [ops.zeros(())]), "b": None})
    lab.equal([1.0, 1.0], lab.components(found["a"][0], s))
    lab.equal([0.0, 0.0], lab.components(found["a"][1][0], s))
    lab.check(found["b"] is None, "None in a nest")


@behaviour("`args` that are neither a tuple nor a list raise a ValueError")
def _(lab, s):
    with lab.raises(ValueError, "tuple"):
        s.run(lambda x: x, args=ops.ones(()))


@behaviour("The result of one `run` can be an argument of the next `run`")
def _(lab, s):
    value = numbered(s, lambda i: np.float32(i + 1))
    for _ in range(3):
        value = s.run(lambda x: x * 2.0, args=(value,))
    lab.equal([8.0, 16.0], lab.components(value, s))


@behaviour("A compiled function may call `run` several times")
def _(lab, s):
    v = variable_of(s, 0.0, aggregation="mean")

    @kd.function
    def several():
        for _ in range(3):
            s.run(lambda: v.assign_add(1.0) is None)
        return v + 0.0

    lab.equal(3.0, several())
    lab.equal(6.0, several())


@behaviour("`run` of a compiled function returns the same as a compiled function that calls `run`")
def _(lab, s):
    value = numbered(s, lambda i: np.float32(i + 1))
    inner = kd.function(lambda x: x * 3.0)
    outer = kd.function(lambda x: s.run(lambda x: x * 3.0, args=(x,)))
    for found in (s.run(inner, args=(value,)), outer(value)):
        lab.equal([3.0, 6.0], lab.components(found, s))


@behaviour("A loop with SGD trains as on one replica, compiled or not")
def _(lab, s):
    same(lab, s)
    lab.equal(trained(s), trained(s, compiled=False), FLOAT32)


@behaviour("Adam, and SGD with momentum and `global_clipnorm`, train as on one replica")
def _(lab, s):
    clipped = {"momentum": 0.9, "global_clipnorm": 0.5}
    for make in (keras.optimizers.Adam, lambda rate: keras.optimizers.SGD(rate, **clipped)):
        same(lab, s, optimizer=lambda make=make: make(0.1))


@behaviour("A last batch with fewer rows than replicas changes the weights as on one replica")
def _(lab, s):
    same(lab, s, batches=[(X, Y), (X[:1], Y[:1])])


@behaviour("A learning-rate schedule advances once per step, not once per replica")
def _(lab, s):
    schedule = lambda: keras.optimizers.SGD(  # noqa: E731
        keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)
    )
    same(lab, s, optimizer=schedule)
    layer, optimizer = dense(s, schedule)
    s.run(training_step(layer, optimizer), args=(next(iter(s.distribute_dataset([(X, Y)]))),))
    lab.equal(1, optimizer.iterations)


@behaviour("With `gradient_accumulation_steps` a loop trains as on one replica")
def _(lab, s):
    same(lab, s, optimizer=lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2))


@behaviour("Weight regularizers that `scale_regularization_loss` has scaled count once")
def _(lab, s):
    same(lab, s, kernel_regularizer=keras.regularizers.L2(0.1))


@behaviour("The sum of the losses that the replicas return is the loss of the global batch")
def _(lab, s):
    layer, optimizer = dense(s)
    [batch] = s.distribute_dataset([(X, Y)])
    losses = s.run(training_step(layer, optimizer), args=(batch,))
    lab.equal(np.mean(np.square(X - Y)), s.reduce("SUM", losses, axis=None), FLOAT32)


@behaviour("After training the weights and the optimizer's variables are equal on all replicas")
def _(lab, s):
    layer, optimizer = dense(s, lambda: keras.optimizers.Adam(0.1))
    step = training_step(layer, optimizer)
    for batch in s.distribute_dataset([(X, Y)] * 2):
        s.run(step, args=(batch,))
    for variable in (*layer.weights, *optimizer.variables):
        first, second = lab.components(variable, s)
        lab.equal(first, second)


@behaviour("One step may train two models with two optimizers")
def _(lab, s):
    def kernels(strategy):
        pairs = [dense(strategy), dense(strategy, lambda: keras.optimizers.Adam(0.05))]
        steps = [training_step(*pair) for pair in pairs]
        both = lambda batch: [step(batch) for step in steps]  # noqa: E731
        for batch in strategy.distribute_dataset([(X, Y)] * 2):
            strategy.run(both, args=(batch,))
        return [layer.kernel for layer, _ in pairs]

    for one, other in zip(kernels(kd.get_strategy()), kernels(s), strict=True):
        lab.equal(one, other, FLOAT32)


@behaviour("The gradient of a variable that the loss does not read is None")
def _(lab, s):
    used, unused = variable_of(s, 2.0), variable_of(s, 3.0)
    found = s.run(lambda: kd.value_and_grad(lambda: used * used, [used, unused])[1])
    lab.equal([4.0, 4.0], lab.components(found[0], s))
    lab.check(found[1] is None, f"{found[1]}")


@behaviour("The weights of a layer that the first step builds are mirrored")
def _(lab, s):
    with s.scope():
        layer = keras.layers.Dense(1, kernel_initializer="ones")
    value = numbered(s, lambda i: np.full((1, 2), i + 1, "float32"))
    lab.equal([[[2.0]], [[4.0]]], lab.components(s.run(layer, args=(value,)), s))
    lab.equal(2, len(lab.components(layer.kernel, s)))


@behaviour("A recurrent network trains as on one replica")
def _(lab, s):
    rows = np.linspace(0, 1, 24, dtype="float32").reshape(4, 3, 2)

    def weights(strategy):
        keras.utils.set_random_seed(3)
        with strategy.scope():
            layer = keras.layers.LSTM(2)
            layer.build((None, 3, 2))
            optimizer = keras.optimizers.SGD(0.1)
            optimizer.build(layer.trainable_variables)

        def step(x):
            loss = lambda: kd.compute_average_loss(  # noqa: E731
                ops.sum(ops.square(layer(x)), axis=-1), global_batch_size=4
            )
            _, gradients = kd.value_and_grad(loss, layer.trainable_variables)
            optimizer.apply(gradients, layer.trainable_variables)

        for batch in strategy.distribute_dataset([rows]):
            strategy.run(step, args=(batch,))
        return layer.weights

    for one, other in zip(weights(kd.get_strategy()), weights(s), strict=True):
        lab.equal(one, other, FLOAT32)


@behaviour(
    "The result of a metric that replicas update is that of all rows; `reset_state` resets it on "
    "all replicas"
)
def _(lab, s):
    with s.scope():
        mean, accuracy = keras.metrics.Mean(), keras.metrics.BinaryAccuracy()

    def step(batch):
        x, y = batch
        mean.update_state(x)
        accuracy.update_state(ops.cast(y > 4.0, "float32"), x / 5.0)

    for batch in s.distribute_dataset([(X, Y)]):
        s.run(step, args=(batch,))
    lab.equal(2.5, mean.result(), FLOAT32)
    lab.equal(np.mean((X / 5.0 > 0.5) == (Y > 4.0)), accuracy.result(), FLOAT32)
    mean.reset_state()
    lab.equal(0.0, mean.result())


@behaviour(
    "In the function of a `merge_call`, `optimizer.apply` takes gradients that are already reduced"
)
def _(lab, s):
    layer, optimizer = dense(s)

    def merge(given, gradient):
        total = given.reduce("SUM", gradient, axis=None)
        optimizer.apply([total], [layer.kernel])

    def step(x):
        kd.get_replica_context().merge_call(merge, args=(ops.reshape(x, (1, 1)),))

    s.run(step, args=(numbered(s, lambda i: np.float32(i + 1)),))
    lab.equal([[[1.0 - 0.1 * 3.0]]] * 2, lab.components(layer.kernel, s), FLOAT32)


@behaviour("In an evaluation loop `reduce` sums the counts of the replicas")
def _(lab, s):
    step = lambda batch: ops.sum(ops.cast(batch[0] > 1.5, "int32"))  # noqa: E731
    total = sum(
        int(s.reduce("SUM", s.run(step, args=(batch,)), axis=None))
        for batch in s.distribute_dataset([(X, Y), (X[:3], Y[:3])])
    )
    lab.equal(5, total)


@behaviour("`run` raises a user's exception unchanged, and the strategy can still be used")
def _(lab, s):
    def step():
        raise ZeroDivisionError("own words")

    for run in (s.run, kd.function(s.run)):
        with lab.raises(ZeroDivisionError, "own words"):
            run(step)
    lab.still_usable(s)


@behaviour("A dict that one `run` returns can be the `kwargs` of the next `run`")
def _(lab, s):
    number = s.run(lambda: kd.get_replica_context().replica_id_in_sync_group + 1)
    named = s.run(lambda x: {"a": x * 2, "b": x * x}, args=(number,))
    lab.equal([6, 14], lab.components(s.run(lambda b, a: a + 2 * b + 2, kwargs=named), s))


@behaviour(
    "`run` may call a metric as its function; each replica gets the whole of a list of numbers in "
    "`args`"
)
def _(lab, s):
    with s.scope():
        metrics = keras.metrics.Precision(), keras.metrics.Recall(), keras.metrics.Mean()
    for metric in metrics[:2]:
        found = s.run(metric, args=([0, 1, 1, 1], [1.0, 0.0, 1.0, 1.0]))
        lab.equal([2 / 3] * 2, lab.components(found, s), FLOAT32)
        lab.equal(2 / 3, metric.result(), FLOAT32)
    s.run(metrics[2], args=(np.float32([1, 2, 3]),))
    lab.equal([2.0, 6.0], [lab.numpy(one) for one in (metrics[2].result(), metrics[2].count)])


OWN_ROWS = (
    "In a replica Keras 2's metrics return the result of all replicas; Keras 3's metrics return "
    "the result of the replica's own rows."
)


@behaviour(
    "`metric.result()` in a replica is the result of the replica's own rows; outside of replicas "
    "it is the result of all rows",
    tensorflow=OWN_ROWS,
    jax=OWN_ROWS,
    torch=OWN_ROWS,
)
def _(lab, s):
    with s.scope():
        metric = keras.metrics.Sum()

    def step(x):
        metric.update_state(x)
        return metric.result()

    found = s.run(step, args=(numbered(s, lambda i: np.float32([i + 1])),))
    lab.equal([[1.0, 2.0], 3.0], [lab.components(found, s), lab.numpy(metric.result())])


@behaviour("A metric made outside of the scope can be updated in the scope and by replicas")
def _(lab, s):
    metric = keras.metrics.Mean()
    with s.scope():
        for number in range(10):
            metric.update_state(float(number))
    lab.equal(4.5, metric.result())
    value = numbered(s, lambda i: np.float32(100 * (i + 1)))
    s.run(lambda x: metric.update_state(x) is None, args=(value,))
    lab.equal(345.0 / 12, metric.result(), FLOAT32)


@behaviour("If variables are among the arguments of `run`, the step gets the same objects")
def _(lab, s):
    layer, optimizer = dense(s)
    x = np.float32([[1.0]])

    def step(variables, x):
        lab.check(variables[0] is layer.kernel, "the variable itself")
        loss = lambda: ops.sum(ops.square(layer(x) - 3.0))  # noqa: E731
        _, gradients = kd.value_and_grad(loss, variables)
        optimizer.apply(gradients, variables)

    s.run(step, args=(layer.trainable_variables, x))
    lab.equal([[[1.8]]] * 2, lab.components(layer.kernel, s), FLOAT32)


OUTSIDE = "kerasdist updates all copies; Keras 2's optimizers raise a RuntimeError."


@behaviour(
    "`optimizer.apply` in cross-replica context; in a replica, without variables, it does nothing",
    tensorflow=OUTSIDE,
    jax=OUTSIDE,
    torch=OUTSIDE,
)
def _(lab, s):
    layer, optimizer = dense(s)
    with s.scope():
        optimizer.apply([ops.ones((1, 1))], [layer.kernel])
    lab.equal([[[0.9]]] * 2, lab.components(layer.kernel, s), FLOAT32)
    s.run(lambda: optimizer.apply([], []))
    lab.equal([[[0.9]]] * 2, lab.components(layer.kernel, s), FLOAT32)


@behaviour("Adam uses the sum of the replicas' gradients, whatever aggregation the variable has")
def _(lab, s):
    for aggregation in ("none", "sum"):
        with s.scope():
            v = keras.Variable(2.0, aggregation=aggregation)
            optimizer = keras.optimizers.Adam(0.01, beta_1=0.2, beta_2=0.2, epsilon=1e-8)

        def step(by, v=v, optimizer=optimizer):
            _, gradients = kd.value_and_grad(lambda: by * 0.5 * v, [v])
            optimizer.apply(gradients, [v])

        for expected in ([1.99, 1.2, 1.8], [1.98, 1.44, 2.16]):
            s.run(step, args=(numbered(s, lambda i: np.float32(i + 1)),))
            found = [lab.numpy(one) for one in (v, *optimizer.variables[-2:])]
            lab.equal(expected, [float(one) for one in found], FLOAT32)


@behaviour(
    "`training` is passed on to inner layers; `model.losses` in a replica has the losses of this "
    "replica's last call"
)
def _(lab, s):
    class Inner(keras.layers.Layer):
        def call(self, x, training=None):
            self.add_loss(ops.mean(x))
            return x if training else 0.0 * x

    with s.scope():
        model = keras.Sequential([Inner()])

    def step(x):
        model(x, training=True)
        kd.get_replica_context().merge_call(lambda _: None)
        [loss] = model.losses
        return loss, ops.stack([model(x)[0, 0], model(x, training=True)[0, 0]])

    x = numbered(s, lambda i: np.float32([[i + 1]]))
    for run in (s.run, kd.function(s.run)):
        losses, values = run(step, args=(x,))
        lab.equal([1.0, 2.0], lab.components(losses, s))
        lab.equal([[0.0, 1.0], [0.0, 2.0]], lab.components(values, s))
