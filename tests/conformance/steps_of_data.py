"""Steps of the user that take the data alone, as on TensorFlow and PyTorch."""

import importlib
from typing import Any

import keras

from tests.conformance.steps import build_parts, losses_of_two, parts, triplet_losses

# How users of the backend write a loss and an update.
own: Any = importlib.import_module(f"tests.conformance.steps_{keras.backend.backend()}")


def guide_model(scale=1.0):
    class Model(keras.Model):
        def train_step(self, data):
            x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)

            def forward():
                y_pred = self(x, training=True)
                given = {"x": x, "y": y, "y_pred": y_pred, "sample_weight": sample_weight}
                return self.compute_loss(**given), y_pred

            loss, y_pred = own.update(self, forward, scale)
            for metric in self.metrics:
                if metric.name == "loss":
                    metric.update_state(loss)
                else:
                    metric.update_state(y, y_pred, sample_weight=sample_weight)
            return {metric.name: metric.result() for metric in self.metrics}

        def test_step(self, data):
            x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
            y_pred = self(x, training=False)
            for metric in self.metrics:
                if metric.name != "loss":
                    metric.update_state(y, y_pred)
            return {m.name: m.result() for m in self.metrics if m.name != "loss"}

        def predict_step(self, data):
            x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
            return {"double": 2.0 * self(x, training=False), "input": x}

    return Model


def judged_model():
    """A layer that is not trained, and that only the step calls, which builds it."""

    class Judge(keras.layers.Layer):
        def build(self, shape):
            self.kernel = self.add_weight(shape=(shape[-1], 4), initializer="glorot_uniform")

        def call(self, x):
            return keras.ops.matmul(x, self.kernel)

    class Judged(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense, self.judge = keras.layers.Dense(1), Judge(trainable=False)

        def call(self, x):
            return self.dense(x)

        def train_step(self, data):
            x, y = data

            def forward():
                y_pred = self(x, training=True)
                error, judged = y - y_pred, self.judge(y_pred)
                return own.mean(own.square(error)) + own.mean(own.square(judged)), y_pred

            loss, _ = own.update(self, forward)
            return {"loss": loss}

    return Judged


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
            def forward():
                losses = triplet_losses(self, data[0])
                return own.mean(losses) if repaired else own.total(losses), losses

            _, losses = own.update(self, forward)
            self.tracker.update_state(losses)
            return {"loss": self.tracker.result()}

    return Siamese


def reporting_model(report):
    """Its steps return ``report(model, y, y_pred, loss)``."""

    class Model(keras.Model):
        def train_step(self, data):
            x, y = data

            def forward():
                y_pred = self(x, training=True)
                return own.mean(own.square(y_pred - y)) + sum(self.losses), y_pred

            loss, y_pred = own.update(self, forward)
            return report(self, y, y_pred, loss)

        def test_step(self, data):
            x, y = data
            y_pred = self(x, training=False)
            return report(self, y, y_pred, own.mean(own.square(y_pred - y)))

    return Model


def scaled(optimizer, loss):
    """As who scales only where an optimizer asks for it."""
    asks = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    return optimizer.scale_loss(loss) if asks else loss


def two_optimizer_model(losses=losses_of_two, *, together=True):
    """Works for both optimizers at once, or for each after the other's update."""

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            parts(self)

        def build(self, shape):
            build_parts(self, shape)
            self.optimizer.build(self.maker.trainable_variables)
            self.built = True

        def call(self, x):
            return self.judge(self.maker(x))

        def train_step(self, data):
            x, real = data[0], data[0][:, :3]
            optimizers = self.judge_optimizer, self.optimizer
            variables = self.judge.trainable_variables, self.maker.trainable_variables
            metrics = self.judge_loss, self.maker_loss

            def forward(of):
                made = self.maker(x)
                found = losses(made, real, self.judge(made), self.judge(real))
                for one in of:
                    metrics[one].update_state(keras.ops.stop_gradient(found[one]))
                return {one: scaled(optimizers[one], found[one]) for one in of}

            for of in [(0, 1)] if together else [(0,), (1,)]:
                given, gradients = own.differentiable(lambda of=of: forward(of))
                found = {one: gradients(given[one], variables[one]) for one in of}
                for one in of:
                    own.apply(optimizers[one], found[one], variables[one])
            return {metric.name: metric.result() for metric in metrics}

    return Model
