"""A custom loop under a strategy equals plain Keras with the whole batch on one device."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.conformance.compare import ADAPTIVE
from tests.conformance.lazy import kd, keras, ops
from tests.facade.case import case
from tests.facade.lab import FLOAT32, fresh, numbered


def rows(count, seed=0, features=4):
    data = np.random.default_rng(seed)
    x = data.normal(size=(count, features)).astype("float32")
    return x, (x.sum(1, keepdims=True) + 0.1 * data.normal(size=(count, 1))).astype("float32")


def batched(arrays, size):
    return [tuple(a[i : i + size] for a in arrays) for i in range(0, len(arrays[0]), size)]


def dense():
    layers = [keras.Input((4,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(1)]
    return keras.Sequential(layers)


def squared(y, p, size):
    """A loss written by hand, for any batch size."""
    each = ops.mean(ops.square(y - p), axis=-1)
    return kd.compute_average_loss(each, global_batch_size=size)


@dataclass(frozen=True)
class Loop:
    """A custom loop, and what plain Keras is to do instead."""

    build: Callable[[], Any] = dense
    optimizer: Callable[[], Any] = lambda: keras.optimizers.SGD(0.1)
    # Made in the scope: a function of targets, predictions and the global batch size.
    loss: Callable[[], Any] = lambda: squared
    plain_loss: Any = "mean_squared_error"
    compiled: bool = True

    def plain(self, batches):
        """Plain Keras: `train_on_batch`, nothing of kerasdist's."""
        fresh()
        model = self.build()
        model.compile(self.optimizer(), self.plain_loss)
        losses = []
        for batch in batches:
            model.reset_metrics()
            losses.append(float(model.train_on_batch(*batch)))
        return outcome(model, model.optimizer, losses)

    def made(self, strategy):
        with strategy.scope():
            model, optimizer = self.build(), self.optimizer()
            optimizer.build(model.trainable_variables)
        return model, optimizer

    def under(self, strategy, batches, made=None):
        fresh()
        model, optimizer = (made or self.made)(strategy)
        with strategy.scope():
            loss = self.loss()

        def replica_step(x, y, size):
            def forward():
                value = loss(y, model(x, training=True), size)
                return value + sum(map(kd.scale_regularization_loss, model.losses))

            variables = model.trainable_variables
            value, gradients = kd.value_and_grad(forward, variables)
            optimizer.apply(gradients, variables)
            return value

        def step(batch, size):
            result = strategy.run(replica_step, args=(*batch, size))
            return strategy.reduce("SUM", result, axis=None)

        step = kd.function(step) if self.compiled else step
        losses = []
        for batch, plain in zip(strategy.distribute_dataset(batches), batches, strict=True):
            losses.append(float(step(batch, len(plain[0]))))
        return outcome(model, optimizer, losses)


def outcome(model, optimizer, losses):
    optimizer.finalize_variable_values(model.trainable_variables)
    return {
        "weights": model.get_weights(),
        # The first is the count of steps, the second the rate.
        "optimizer": [np.array(ops.convert_to_numpy(v)) for v in optimizer.variables],
    }, losses


def same(lab, loop, batches, tolerance=FLOAT32, strategy=None):
    plain, plain_losses = loop.plain(batches)
    ours, losses = loop.under(strategy or lab.strategy(), batches)
    lab.equal(plain, ours, tolerance)
    lab.equal(np.float32(plain_losses), np.float32(losses), tolerance)


@case(replicas=(1, 2, 3, 4))
def by_hand(lab):
    """A custom loop with `compute_average_loss` and SGD trains as on one device."""
    for compiled in (True, False):
        same(lab, Loop(compiled=compiled), batched(rows(17), 8))


@case
def a_layer_is_frozen_between_steps(lab, strategy):
    """A layer's `trainable` may change between two calls of `run`."""
    model, optimizer = Loop().made(strategy)
    layer = model.layers[0]

    def replica_step(x, y):
        variables = model.trainable_variables
        _, gradients = kd.value_and_grad(lambda: squared(y, model(x), 8), variables)
        optimizer.apply(gradients, variables)

    for index, batch in enumerate(strategy.distribute_dataset(batched(rows(32), 8))):
        layer.trainable = index % 2 == 0
        before = layer.get_weights()[0]
        strategy.run(replica_step, args=batch)
        changes = not np.array_equal(before, layer.get_weights()[0])
        lab.equal(layer.trainable, changes)


@case(replicas=(1, 2, 4))
def keras_loss_objects(lab):
    """Mean losses of Keras, with sample weights too, train as on one device."""

    def made():
        loss = keras.losses.MeanSquaredError()
        return lambda y, p, size: loss(y, p)

    def weighing(y, p, size=0):
        return keras.losses.MeanSquaredError()(y, p, sample_weight=ops.abs(y[:, 0]) + 1.0)

    same(lab, Loop(loss=made), batched(rows(16), 8))
    same(lab, Loop(loss=lambda: weighing, plain_loss=weighing), batched(rows(16), 8))


OPTIMIZERS = {
    "adam_clipnorm": lambda: keras.optimizers.Adam(0.01, clipnorm=0.05),
    "sgd_global_clipnorm": lambda: keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.1),
    "adam_ema": lambda: keras.optimizers.Adam(
        0.01, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2
    ),
    "sgd_accumulation": lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2),
}


def optimizing(name):
    tolerance = ADAPTIVE if name.startswith("adam") else FLOAT32
    return lambda lab: same(lab, Loop(optimizer=OPTIMIZERS[name]), batched(rows(20), 8), tolerance)


for _name in OPTIMIZERS:
    _title = f"A custom loop with {_name.replace('_', ', ')} trains as on one device"
    case(name=_name, title=_title)(optimizing(_name))


@case
def embeddings(lab):
    """An Embedding, whose gradient is sparse on TensorFlow, trains as on one device."""

    def build():
        layers = [keras.Input((3,), dtype="int32"), keras.layers.Embedding(6, 4)]
        return keras.Sequential([*layers, keras.layers.Flatten(), keras.layers.Dense(1)])

    data = np.random.default_rng(5)
    x = data.integers(0, 6, (14, 3)).astype("int32")
    y = x.sum(1, keepdims=True).astype("float32") / 10
    same(lab, Loop(build=build), batched((x, y), 8))


@case
def regularizers(lab):
    """Penalties scaled by `scale_regularization_loss` train as on one device."""

    def build():
        penalty = keras.regularizers.L2(0.1)
        layers = [keras.layers.Dense(8, kernel_regularizer=penalty), keras.layers.Dense(1)]
        return keras.Sequential([keras.Input((4,)), *layers])

    same(lab, Loop(build=build), batched(rows(13), 8))


@case
def apply_gradients_and_partial_variables(lab, strategy):
    """`apply_gradients` takes pairs for only some of the variables."""
    with strategy.scope():
        used, other = keras.Variable([1.0, 2.0]), keras.Variable(5.0)
        optimizer = keras.optimizers.SGD(0.5)

    def step(x):
        value, gradients = kd.value_and_grad(lambda: ops.sum(used * x), [used, other])
        pairs = zip(gradients, [used, other], strict=True)
        optimizer.apply_gradients([pair for pair in pairs if pair[0] is not None])
        return value

    x = numbered(strategy, lambda i: np.float32([1.0, i]))
    strategy.run(step, args=(x,))
    # The sums are 2 and 1.
    lab.equal([0.0, 1.5], used)
    lab.equal(5.0, other)
    lab.equal([[0.0, 1.5]] * 2, lab.components(used, strategy))


@case
def fit_and_a_custom_loop_on_one_model(lab):
    """`fit`, a custom loop and `fit` again train one model as on one device."""
    x, y = rows(16)

    def train(strategy):
        fresh()
        with strategy.scope():
            model = dense()
            model.compile("sgd", "mean_squared_error")
        model.fit(x, y, batch_size=8, verbose=0, shuffle=False)
        Loop().under(strategy, batched((x, y), 8), lambda _: (model, model.optimizer))
        model.fit(x, y, batch_size=8, verbose=0, shuffle=False)
        return model.get_weights(), model.evaluate(x, y, batch_size=8, verbose=0)

    lab.equal(train(kd.get_strategy()), train(lab.strategy()), FLOAT32)


@case(replicas=(1, 2))
def loss_scaling(lab):
    """A LossScaleOptimizer unscales gradients, and skips a step whose gradients overflow."""
    first, last = batched(rows(16), 8)
    unscaled, _ = Loop().plain([first, last])
    overflowing = np.full_like(first[0], np.nan), first[1]
    made = []

    def scaling():
        made.append(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)))
        return made[0]

    def loss():
        return lambda y, p, size: made[0].scale_loss(squared(y, p, size))

    loop = Loop(optimizer=scaling, loss=loss)
    found, _ = loop.under(lab.strategy(), [first, overflowing, last])
    lab.equal(unscaled["weights"], found["weights"], FLOAT32)
    [optimizer] = made
    lab.equal(2.0**14, float(optimizer.dynamic_scale.value))
    lab.equal(2, int(optimizer.inner_optimizer.iterations.value))
