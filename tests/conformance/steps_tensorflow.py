"""How TensorFlow's users write a loss and an update."""

import tensorflow as tf

mean, total, square = tf.reduce_mean, tf.reduce_sum, tf.square


def update(model, forward, scale=1.0):
    """A step down a loss; ``forward`` returns the loss first."""
    with tf.GradientTape() as tape:
        loss, *others = forward()
    variables = model.trainable_variables
    gradients = [scale * gradient for gradient in tape.gradient(loss, variables)]
    model.optimizer.apply_gradients(zip(gradients, variables, strict=True))
    return loss, *others


def differentiable(forward):
    """What ``forward`` returns, and a function of a loss in it and of variables."""
    with tf.GradientTape(persistent=True) as tape:
        values = forward()
    return values, tape.gradient


def apply(optimizer, gradients, variables):
    optimizer.apply(gradients, variables)
