"""Steps of the user with TensorFlow's signature."""

import tensorflow as tf

from tests.conformance.steps import (
    in_order,
    losses_of_two,
    mixing_losses_of_two,
    two_parts_model,
    with_raw_mean,
)

mean, total, square = tf.reduce_mean, tf.reduce_sum, tf.square


def update(model, forward, scale=1.0):
    """A step down a loss, as TensorFlow's users write it; ``forward`` returns the loss first."""
    with tf.GradientTape() as tape:
        loss, *others = forward()
    variables = model.trainable_variables
    gradients = [scale * gradient for gradient in tape.gradient(loss, variables)]
    model.optimizer.apply_gradients(zip(gradients, variables, strict=True))
    return loss, *others


def vector_loss_model():
    """keras.io's siamese network and WGAN-GP in one: both differentiate a value an example."""

    class Model(with_raw_mean()):
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


def two_optimizer_model():
    class Model(two_parts_model()):
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
