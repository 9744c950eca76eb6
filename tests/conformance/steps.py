"""Models with steps written for one device, in each backend's own signature.

Every function returns a function that makes the class: the class must be made by whoever builds
the model, in the scope or out of it.
"""

import importlib

from tests.conformance.lazy import kd, keras


def _of(backend):
    return importlib.import_module(f"tests.conformance.steps_{backend}")


def _model(backend, name, *arguments, **options):
    """A class with a step of JAX's signature, or of the one that TensorFlow and PyTorch share."""
    if backend == "jax":
        return getattr(_of(backend), name)(*arguments, **options)
    shared = importlib.import_module("tests.conformance.steps_of_data")
    return getattr(shared, name)(_of(backend), *arguments, **options)


def guide_model(backend, scale=1.0):
    return lambda: _model(backend, "guide_model", scale)


def raw_loss_model(backend):
    return lambda: _model(backend, "raw_loss_model")


def reading_losses_model(backend):
    """Adds up a mean of squares and what layers added, read by itself."""
    return lambda: _model(backend, "reading_losses_model")


def vector_loss_model(backend):
    return lambda: _of(backend).vector_loss_model()


def test_step_model(backend):
    return lambda: _model(backend, "test_step_model")


def triplet_model(backend, *, repaired):
    return _model(backend, "triplet_model", repaired=repaired)


def reporting_model(backend, report):
    """Its steps return ``report(model, y, y_pred, loss)``."""
    return lambda: _model(backend, "reporting_model", report)


def two_optimizer_model(backend):
    return lambda: _of(backend).two_optimizer_model()


def scaling_optimizers_model(backend, *, together):
    """Two optimizers that scale their losses: both at first, or each after the other's update."""
    return lambda: _of(backend).scaling_optimizers_model(together)


def parts(model):
    """The two halves of the model with two optimizers."""
    model.maker = keras.layers.Dense(3, name="maker")
    model.judge = keras.layers.Dense(1, name="judge")
    model.judge_optimizer = keras.optimizers.SGD(0.1, momentum=0.5)
    model.maker_loss = keras.metrics.Mean(name="maker_loss")
    model.judge_loss = keras.metrics.Mean(name="judge_loss")


def two_parts_model():
    """Both halves, built, on TensorFlow and PyTorch."""

    class TwoParts(keras.Model):
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

    return TwoParts


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


def in_order(together, scaled, gradients, apply):
    """Two optimizers' work: kind by kind for both of them, or all of the first one's first."""
    for indices in [(0, 1)] if together else [(0,), (1,)]:
        losses = [scaled(index) for index in indices]
        found = [gradients(index, loss) for index, loss in zip(indices, losses, strict=True)]
        for index, own in zip(indices, found, strict=True):
            apply(index, own)


def triplet_losses(model, triplets):
    """How much nearer the positive ought to be to the anchor than the negative, by example."""
    anchor, positive, negative = (model(one) for one in triplets)
    near = keras.ops.sum(keras.ops.square(anchor - positive), -1)
    far = keras.ops.sum(keras.ops.square(anchor - negative), -1)
    return keras.ops.maximum(near - far + 0.5, 0.0)


def with_raw_mean():
    """A class of models whose only metric is the mean of a loss that their steps write."""

    class WithRawMean(keras.Model):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            self.tracker = keras.metrics.Mean(name="raw")

        @property
        def metrics(self):
            return [self.tracker]

    return WithRawMean
