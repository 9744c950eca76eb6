"""Steps of the user with TensorFlow's signature."""

import keras
import tensorflow as tf

from tests.conformance.steps import (
    in_order,
    losses_of_two,
    mixing_losses_of_two,
    parts,
    triplet_losses,
)


def guide_model(scale):
    class Model(keras.Model):
        def train_step(self, data):
            x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
            with tf.GradientTape() as tape:
                y_pred = self(x, training=True)
                loss = self.compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight)
            gradients = tape.gradient(loss, self.trainable_variables)
            gradients = [scale * gradient for gradient in gradients]
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            for metric in self.metrics:
                if metric.name == "loss":
                    metric.update_state(loss)
                else:
                    metric.update_state(y, y_pred, sample_weight=sample_weight)
            return {metric.name: metric.result() for metric in self.metrics}

    return Model


def raw_loss_model():
    class Model(keras.Model):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            self.tracker = keras.metrics.Mean(name="raw")

        @property
        def metrics(self):
            return [self.tracker]

        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(self(x, training=True) - y))
            gradients = tape.gradient(loss, self.trainable_weights)
            self.optimizer.apply(gradients, self.trainable_weights)
            self.tracker.update_state(loss)
            return {"raw": self.tracker.result()}

    return Model


def reading_losses_model():
    class Model(keras.Model):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(self(x, training=True) - y)) + sum(self.losses)
            gradients = tape.gradient(loss, self.trainable_weights)
            self.optimizer.apply(gradients, self.trainable_weights)
            return {"raw": loss, "added": sum(self.losses)}

    return Model


def vector_loss_model():
    """keras.io's siamese network and WGAN-GP in one: both differentiate a value an example."""

    class Model(keras.Model):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            self.tracker = keras.metrics.Mean(name="raw")

        @property
        def metrics(self):
            return [self.tracker]

        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                with tf.GradientTape() as inner:
                    inner.watch(x)
                    predicted = self(x, training=True)
                slope = inner.gradient(predicted, [x])[0]
                loss = tf.reduce_sum(tf.square(predicted - y), -1)
                loss += tf.reduce_sum(tf.square(slope), -1)
            gradients = tape.gradient(loss, self.trainable_weights)
            self.optimizer.apply(gradients, self.trainable_weights)
            self.tracker.update_state(loss)
            return {"raw": self.tracker.result()}

    return Model


def test_step_model():
    class Model(keras.Model):
        def test_step(self, data):
            x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
            y_pred = self(x, training=False)
            self.compute_loss(x=x, y=y, y_pred=y_pred, training=False)
            for metric in self.metrics:
                if metric.name != "loss":
                    metric.update_state(y, y_pred)
            return {m.name: m.result() for m in self.metrics if m.name != "loss"}

        def predict_step(self, data):
            x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
            return {"double": 2.0 * self(x, training=False), "input": x}

    return Model


def two_optimizer_model():
    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            parts(self)

        def build(self, shape):
            self.maker.build(shape)
            self.judge.build((None, 3))
            self.judge_optimizer.build(self.judge.trainable_variables)
            self.optimizer.build(self.maker.trainable_variables)
            self.built = True

        def call(self, x):
            return self.judge(self.maker(x))

        def train_step(self, data):
            x, _ = data
            real = x[:, :3]
            with tf.GradientTape(persistent=True) as tape:
                made = self.maker(x)
                judge_loss, maker_loss = losses_of_two(
                    made, real, self.judge(made), self.judge(real)
                )
            judge, maker = self.judge.trainable_variables, self.maker.trainable_variables
            self.judge_optimizer.apply(tape.gradient(judge_loss, judge), judge)
            self.optimizer.apply(tape.gradient(maker_loss, maker), maker)
            self.judge_loss.update_state(judge_loss)
            self.maker_loss.update_state(maker_loss)
            return {m.name: m.result() for m in (self.judge_loss, self.maker_loss)}

    return Model


def scaling_optimizers_model(together):
    class Model(two_optimizer_model()):
        def train_step(self, data):
            x, _ = data
            optimizers = self.judge_optimizer, self.optimizer
            variables = self.judge.trainable_variables, self.maker.trainable_variables
            metrics = self.judge_loss, self.maker_loss

            def scaled(index):
                with tf.GradientTape() as tape:
                    made = self.maker(x)
                    judged = self.judge(made), self.judge(x[:, :3])
                    loss = mixing_losses_of_two(made, x[:, :3], *judged)[index]
                    target = optimizers[index].scale_loss(loss)
                metrics[index].update_state(loss)
                return tape, target

            def gradients(index, taped):
                tape, target = taped
                return tape.gradient(target, variables[index])

            def apply(index, gradients):
                optimizers[index].apply(gradients, variables[index])

            in_order(together, scaled, gradients, apply)
            return {metric.name: metric.result() for metric in metrics}

    return Model


def triplet_model(*, repaired):
    class Siamese(keras.Model):
        def __init__(self):
            super().__init__()
            self.embedding = keras.layers.Dense(3)
            self.tracker = keras.metrics.Mean(name="loss")

        def call(self, inputs):
            return self.embedding(inputs)

        @property
        def metrics(self):
            return [self.tracker]

        def train_step(self, data):
            with tf.GradientTape() as tape:
                losses = triplet_losses(self, data[0])
                loss = tf.reduce_mean(losses) if repaired else tf.reduce_sum(losses)
            gradients = tape.gradient(loss, self.trainable_weights)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_weights, strict=True))
            self.tracker.update_state(losses)
            return {"loss": self.tracker.result()}

    return Siamese


def reporting_model(report):
    class Model(keras.Model):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                y_pred = self(x, training=True)
                loss = tf.reduce_mean(tf.square(y_pred - y))
            gradients = tape.gradient(loss, self.trainable_weights)
            self.optimizer.apply(gradients, self.trainable_weights)
            return report(self, y, y_pred, loss)

        def test_step(self, data):
            x, y = data
            y_pred = self(x, training=False)
            return report(self, y, y_pred, tf.reduce_mean(tf.square(y_pred - y)))

    return Model
