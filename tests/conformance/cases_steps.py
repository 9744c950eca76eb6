"""Steps of the user, in each backend's own signature (trap 8)."""

import functools
import itertools

from tests.conformance import steps
from tests.conformance.actions import fit, used
from tests.conformance.compare import NORMAL
from tests.conformance.lazy import kd, keras, tf
from tests.conformance.models import compiled, regression, weights_for
from tests.conformance.registry import REPLICAS, case
from tests.environment import everything

N, BATCH = 11, 6
X, Y = regression(N)


def assemble(kind, **options):
    inputs = keras.Input((4,))
    hidden = keras.layers.Dense(5, activation="tanh")(inputs)
    model = kind(inputs, keras.layers.Dense(1)(hidden))
    return compiled(model, keras.optimizers.SGD(0.1), "mse", metrics=["mae"], **options)


@case("custom steps")
def train_step(lab):
    """`train_step`, `test_step` and `predict_step` as Keras's guide writes them."""
    build = lambda: assemble(steps.of(lab.backend).guide_model())  # noqa: E731
    lab.same(build, *used(X, Y, BATCH, epochs=2, sample_weight=weights_for(N)))


@case("custom steps", backends=("tensorflow",), replicas=REPLICAS, like="steps.train_step")
def vector_loss(lab):
    """A step that gives `tape.gradient` one loss for each example, and a gradient by its input.

    keras.io's siamese network and WGAN-GP in one.
    """

    def build(normal=False, **options):
        class Model(keras.Model):
            def train_step(self, data):
                x, y = data
                with tf.GradientTape() as tape:
                    with tf.GradientTape() as inner:
                        inner.watch(x)
                        predicted = self(x, training=True)
                    slope = inner.gradient(predicted, [x])[0]
                    loss = tf.reduce_sum(tf.square(predicted - y), -1)
                    loss += 0.0 if normal else tf.reduce_sum(tf.square(slope), -1)
                gradients = tape.gradient(loss, self.trainable_weights)
                self.optimizer.apply(gradients, self.trainable_weights)
                return {"raw": tf.reduce_mean(loss)}

        inputs = hidden = keras.Input((4,))
        if normal:  # its gradient brings the other replicas' losses
            hidden = keras.layers.BatchNormalization()(keras.layers.Dense(3)(inputs))
        model = Model(inputs, keras.layers.Dense(1)(hidden))
        return compiled(model, keras.optimizers.SGD(0.01), **options)

    # 11 in batches of 3: the last batch of 2 leaves replicas empty.
    lab.same(build, fit(X, Y, batch_size=3, epochs=2))
    lab.same(lambda: build(run_eagerly=True), fit(X, Y, batch_size=3))
    lab.same(lambda: build(normal=True), fit(X, Y, batch_size=5))


@case("custom steps")
def compute_loss(lab):
    """`compute_loss` with a term of its own over the batch, `compute_metrics` that adds one."""

    class Model(keras.Model):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            loss = super().compute_loss(x, y, y_pred, sample_weight, training)
            return loss + 0.1 * keras.ops.mean(keras.ops.square(y_pred))

        def compute_metrics(self, x, y, y_pred, sample_weight=None):
            results = super().compute_metrics(x, y, y_pred, sample_weight)
            self.spread.update_state(keras.ops.mean(keras.ops.abs(y_pred), axis=-1))
            results["spread"] = self.spread.result()
            return results

    def build():
        model = assemble(Model)
        model.spread = keras.metrics.Mean(name="spread")
        return model

    lab.same(build, *used(X, Y, BATCH, sample_weight=weights_for(N)))


@case("custom steps")
def two_optimizers(lab):
    """Two optimizers in one `train_step`, as a GAN has them."""

    def build():
        model = steps.of(lab.backend).two_optimizer_model()()
        model.compile(keras.optimizers.SGD(0.05))
        model.build((None, 4))
        return model

    lab.same(build, fit(X, Y, batch_size=BATCH, epochs=2))


@case("custom steps", backends=("tensorflow", "torch"), replicas=(3, 4))
def one_of_two_optimizers_scales(lab):
    """Two optimizers of which one scales its loss, with gradients that pass between replicas.

    On JAX `fit` is one global program, where no loss is weighted.
    """

    def optimizer(scales):
        sgd = keras.optimizers.SGD(0.05)
        scaling = keras.optimizers.LossScaleOptimizer
        return scaling(sgd, initial_scale=2.0**8, dynamic_growth_steps=2) if scales else sgd

    def build(first_scales, together):
        model = steps.of(lab.backend).two_optimizer_model(
            steps.mixing_losses_of_two, together=together
        )()
        model.judge_optimizer = optimizer(first_scales)
        model.compile(optimizer(not first_scales))
        model.build((None, 4))
        return model

    every = [*itertools.product((True, False), repeat=2)]
    for first_scales, together in every if everything() else every[::3]:
        lab.same(
            functools.partial(build, first_scales, together),
            fit(X, Y, batch_size=4, shuffle=False),
            tolerance=NORMAL,
        )


@case("custom steps", replicas=REPLICAS, like="steps.train_step")
def global_batch(lab):
    """`kd.global_batch` in a `compute_loss` over all pairs of the batch equals one device."""
    x, y = regression(12)

    class Model(keras.Model):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            every, target = kd.global_batch(y_pred), kd.global_batch(y)
            gaps = keras.ops.abs(every - keras.ops.transpose(every))
            wanted = keras.ops.abs(target - keras.ops.transpose(target))
            return keras.ops.mean(keras.ops.square(gaps - wanted))

    # 12 in batches of 5: the last batch of 2 leaves replicas empty.
    lab.same(lambda: assemble(Model), fit(x, y, batch_size=5, epochs=2, shuffle=False))


@case("custom steps", like="steps.train_step")
def gradient_penalty(lab):
    """A step that clips its gradients by hand before `apply`, as one device does."""
    build = lambda: assemble(steps.of(lab.backend).guide_model(scale=0.5))  # noqa: E731
    lab.same(build, fit(X, Y, batch_size=BATCH))
