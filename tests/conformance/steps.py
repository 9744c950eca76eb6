"""Models with steps written for one device, in each backend's own signature.

The functions of a backend's module make the classes: a class must be made where its model is, in
the scope or out of it.
"""

import importlib

from tests.conformance.lazy import kd, keras


def of(backend):
    """The steps of JAX's signature, or of the one that TensorFlow and PyTorch share."""
    name = "steps_jax" if backend == "jax" else "steps_of_data"
    return importlib.import_module(f"tests.conformance.{name}")


def parts(model):
    model.maker = keras.layers.Dense(3, name="maker")
    model.judge = keras.layers.Dense(1, name="judge")
    model.judge_optimizer = keras.optimizers.SGD(0.1, momentum=0.5)
    model.maker_loss = keras.metrics.Mean(name="maker_loss")
    model.judge_loss = keras.metrics.Mean(name="judge_loss")


def build_parts(model, shape):
    """Builds the two halves for inputs of a shape, and the state of the judge's optimizer."""
    model.maker.build(shape)
    model.judge.build((None, 3))
    model.judge_optimizer.build(model.judge.trainable_variables)


def losses_of_two(made, real, judged_made, judged_real):
    """(judge's, maker's): raw means over the batch."""
    ops = keras.ops
    judge = ops.mean(ops.square(judged_real - 1.0)) + ops.mean(ops.square(judged_made))
    maker = ops.mean(ops.square(judged_made - 1.0)) + 0.1 * ops.mean(ops.square(made - real))
    return judge, maker


def mixing_losses_of_two(made, real, judged_made, judged_real):
    """The same, and a term of each whose gradient passes from replica to replica."""
    judge, maker = losses_of_two(made, real, judged_made, judged_real)
    judge += keras.ops.var(kd.global_batch(judged_made - judged_real))
    maker += keras.ops.var(kd.global_batch(judged_made))
    return judge, maker


def triplet_losses(model, triplets):
    """How much nearer the positive ought to be to the anchor than the negative, by example."""
    anchor, positive, negative = (model(one) for one in triplets)
    near = keras.ops.sum(keras.ops.square(anchor - positive), -1)
    far = keras.ops.sum(keras.ops.square(anchor - negative), -1)
    return keras.ops.maximum(near - far + 0.5, 0.0)
