"""BatchNormalization in custom loops: a replica's own rows, or the global batch."""

import tempfile
from functools import partial
from pathlib import Path

import numpy as np

from tests.conformance.compare import NORMAL
from tests.conformance.lazy import kd, keras, ops
from tests.facade.case import case
from tests.facade.cases_training import Loop, batched, rows, same
from tests.facade.lab import FLOAT32, fresh, variable_of

EPSILON = 1e-3
MOMENTUM = 0.6


def far_apart(count):
    x = np.random.default_rng(4).normal(size=(count, 3)) * np.linspace(1, 3, count)[:, None]
    return (x + np.linspace(-5, 5, count)[:, None]).astype("float32")


def normalised(part):
    return (part - part.mean(0)) / np.sqrt(part.var(0) + EPSILON)


def moved(before, new):
    return MOMENTUM * before + (1 - MOMENTUM) * new


def layer_in(strategy, shape=(None, 3), **options):
    fresh()
    with strategy.scope():
        layer = keras.layers.BatchNormalization(momentum=MOMENTUM, **options)
        layer.build(shape)
    return layer


def statistics(lab, layer):
    return [lab.numpy(ops.convert_to_tensor(v)) for v in layer.non_trainable_variables]


@case(replicas=(2, 3))
def own_rows(lab, strategy):
    """By default a replica normalizes by its own rows; reads return the mean over replicas.

    A replica without rows keeps its moving statistics. Assigning outside of replicas sets those of
    all replicas.
    """
    layer = layer_in(strategy)
    batches = [far_apart(8), far_apart(7) + 1.0, far_apart(2)]
    function = lambda x: layer(x, training=True)  # noqa: E731
    means, variances = np.zeros((lab.replicas, 3)), np.ones((lab.replicas, 3))
    for count, batch in enumerate(strategy.distribute_dataset(batches)):
        # Compiled in the second step, with rows of another number on each replica.
        run = lambda x: strategy.run(function, args=(x,))  # noqa: E731
        outputs = (kd.function(run) if count else run)(batch)
        parts = np.array_split(batches[count], lab.replicas)
        expected = [normalised(part) if len(part) else part for part in parts]
        lab.equal(expected, lab.components(outputs, strategy), NORMAL)
        for rank, part in enumerate(parts):
            if len(part):
                means[rank] = moved(means[rank], part.mean(0))
                variances[rank] = moved(variances[rank], part.var(0))
        lab.equal([*np.float32(means)], lab.components(layer.moving_mean, strategy), NORMAL)
        lab.equal(
            [np.float32(means.mean(0)), np.float32(variances.mean(0))],
            statistics(lab, layer),
            NORMAL,
        )
    layer.set_weights([*map(np.float32, ([1] * 3, [0] * 3, [5] * 3, [4] * 3))])
    lab.equal([[5.0] * 3] * lab.replicas, lab.components(layer.moving_mean, strategy))
    lab.equal([[4.0] * 3] * lab.replicas, lab.components(layer.moving_variance, strategy))
    [pieces] = strategy.distribute_dataset([batches[0]])
    outputs = strategy.run(lambda x: layer(x, training=False), args=(pieces,))
    parts = np.array_split(batches[0], lab.replicas)
    expected = [(part - 5.0) / np.float32(np.sqrt(4.0 + EPSILON)) for part in parts]
    lab.equal(expected, lab.components(outputs, strategy), FLOAT32)


def convolution():
    return normalising(keras.layers.Reshape((2, 2, 1)), keras.layers.Conv2D(4, 2, padding="same"))


def normalising(*layers, synchronized=False):
    """Plain Keras needs not synchronize, and may not."""
    norm = keras.layers.BatchNormalization(
        momentum=MOMENTUM, synchronized=synchronized and kd.has_strategy()
    )
    layers = layers or (keras.layers.Dense(8, activation="tanh"),)
    return keras.Sequential(
        [keras.Input((4,)), *layers, norm, keras.layers.Flatten(), keras.layers.Dense(1)]
    )


@case(replicas=(2, 3))
def synchronized(lab, strategy):
    """With `synchronized=True`, results and gradients are those of one device."""
    loop = Loop(build=partial(normalising, synchronized=True))
    same(lab, loop, batched(rows(17), 8), NORMAL, strategy)


@case
def synchronized_by_the_strategy(lab):
    """`MirroredStrategy(batch_norm="synchronized")` synchronizes all layers, compiled or not."""
    strategy = kd.MirroredStrategy(lab.devices, batch_norm="synchronized")
    for loop in (Loop(build=normalising), Loop(build=convolution, compiled=False)):
        same(lab, loop, batched(rows(13), 7), NORMAL, strategy)


@case(replicas=(2, 3))
def synchronized_with_a_mask(lab, strategy):
    """A synchronized layer with a mask computes its statistics only from unmasked values."""
    layer = layer_in(strategy, (None, 2, 3), synchronized=True)
    x = far_apart(8).reshape(4, 2, 3)
    mask = np.array([[1, 1], [1, 0], [0, 0], [1, 1]], bool)
    function = lambda x, mask: layer(x, training=True, mask=mask)  # noqa: E731
    [pieces] = strategy.distribute_dataset([(x, mask)])
    outputs = strategy.gather(strategy.run(function, args=pieces), axis=0)
    there = x[mask]
    expected = (x - there.mean(0)) / np.sqrt(there.var(0) + EPSILON)
    lab.equal(expected, outputs, NORMAL)
    lab.equal(np.float32(moved(0, there.mean(0))), statistics(lab, layer)[0], NORMAL)


@case
def synchronized_where_the_mean_is_large(lab, strategy):
    """The variance is exact even if the mean is much larger than the deviation."""
    layer = layer_in(strategy, (None, 1), synchronized=True)
    for pieces in strategy.distribute_dataset(
        [np.arange(10_000, 10_008.0, dtype="float32")[:, None]]
    ):
        strategy.run(lambda x: layer(x, training=True), args=(pieces,))
    expected = [moved(0, np.float32([10_003.5])), moved(1, np.float32([5.25]))]
    lab.equal(expected, statistics(lab, layer), FLOAT32)


@case
def gradient_penalties(lab):
    """Second derivatives through a synchronized, masked layer are those of one device."""
    x = far_apart(10).reshape(5, 2, 3)
    mask = np.array([[1, 1], [1, 0], [0, 0], [1, 1], [0, 1]], bool)

    def penalty(strategy, synchronized):
        scale = variable_of(strategy, [1.0, 2.0, 3.0])
        layer = layer_in(strategy, (None, 2, 3), synchronized=synchronized)

        def step(x, mask):
            def loss():
                outputs = layer(x * scale, training=True, mask=mask)
                return ops.sum(ops.sin(outputs) * x)

            def squared():
                _, [gradient] = kd.value_and_grad(loss, [scale])
                total = kd.get_replica_context().all_reduce("SUM", gradient)
                return ops.sum(ops.square(total)) / strategy.num_replicas_in_sync

            value, [gradient] = kd.value_and_grad(squared, [scale])
            return value, gradient

        [pieces] = strategy.distribute_dataset([(x, mask)])
        results = strategy.run(step, args=pieces)
        return [lab.numpy(strategy.reduce("SUM", one, axis=None)) for one in results]

    expected = penalty(kd.get_strategy(), synchronized=False)
    lab.equal(expected, penalty(lab.strategy(), synchronized=True), NORMAL)


@case
def fit_after_a_loop(lab):
    """After a custom loop, `fit` and `predict` use the mean of the replicas' statistics."""
    (x, y), batches = rows(16), batched(rows(12, 3), 6)

    def made():
        model = normalising()
        model.compile(keras.optimizers.SGD(0.1), "mean_squared_error")
        return model

    strategy = lab.strategy()
    fresh()
    with strategy.scope():
        model = made()
    run = lambda x, y: model(x, training=True)  # noqa: E731
    for batch in strategy.distribute_dataset(batches):
        strategy.run(run, args=batch)
    fresh()
    plain = made()
    plain.set_weights(model.get_weights())
    lab.equal(plain.predict(x, verbose=0), model.predict(x, verbose=0), FLOAT32)
    lab.equal(
        plain.evaluate(x, y, verbose=0, batch_size=5),
        model.evaluate(x, y, verbose=0, batch_size=5),
        FLOAT32,
    )
    for one in (plain, model):
        one.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    lab.equal(plain.get_weights(), model.get_weights(), NORMAL)


@case
def on_central_storage(lab):
    """Under `CentralStorageStrategy`, moving statistics are the mean over the replicas."""
    strategy = kd.CentralStorageStrategy(lab.devices, lab.devices[0])
    batch = far_apart(8)
    with strategy.scope():
        layer = keras.layers.BatchNormalization(momentum=MOMENTUM)
        model = keras.Sequential([keras.Input((3,)), layer])
    for pieces in strategy.distribute_dataset([batch]):
        strategy.run(lambda x: model(x, training=True), args=(pieces,))
    parts = np.split(batch, 2)
    mean = moved(0, np.mean([part.mean(0) for part in parts], 0))
    variance = moved(1, np.mean([part.var(0) for part in parts], 0))
    lab.equal([np.float32(mean), np.float32(variance)], statistics(lab, layer), NORMAL)
    expected = (batch - mean) / np.sqrt(variance + EPSILON)
    lab.equal(np.float32(expected), model.predict(batch, verbose=0), NORMAL)


@case
def saved_and_loaded(lab, strategy):
    """A synchronized layer is still synchronized after the model is saved and loaded."""
    with strategy.scope():
        model = normalising(synchronized=True)
    x = rows(8)[0]
    for batch in strategy.distribute_dataset([x]):
        strategy.run(lambda x: model(x, training=True), args=(batch,))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.keras"
        model.save(path)
        with strategy.scope():
            again = keras.models.load_model(path)
    lab.check(again.layers[1].synchronized, "it is synchronized")
    lab.equal(model.get_weights(), again.get_weights())
    lab.equal(model.predict(x, verbose=0), again.predict(x, verbose=0), FLOAT32)


@case(backends=("jax", "torch"))
def synchronized_outside(lab):
    """Outside of a scope, Keras refuses `synchronized=True`, as without kerasdist."""
    lab.strategy()
    with lab.raises(ValueError, "synchronized=True is only supported with the TensorFlow"):
        keras.layers.BatchNormalization(synchronized=True)
