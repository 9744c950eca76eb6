"""Steps of the user that take the data alone, as on TensorFlow and PyTorch.

``own`` is `steps_tensorflow` or `steps_torch`: how users of the backend write a loss and an update.
"""

import keras

from tests.conformance.steps import triplet_losses, with_raw_mean


def guide_model(own, scale):
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

    return Model


def raw_loss_model(own):
    class Model(with_raw_mean()):
        def train_step(self, data):
            x, y = data
            [loss] = own.update(self, lambda: [own.mean(own.square(self(x, training=True) - y))])
            self.tracker.update_state(loss)
            return {"raw": self.tracker.result()}

    return Model


def reading_losses_model(own):
    class Model(keras.Model):
        def train_step(self, data):
            x, y = data

            def forward():
                return [own.mean(own.square(self(x, training=True) - y)) + sum(self.losses)]

            [loss] = own.update(self, forward)
            return {"raw": loss, "added": sum(self.losses)}

    return Model


def test_step_model(own):
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


def triplet_model(own, *, repaired):
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


def reporting_model(own, report):
    class Model(keras.Model):
        def train_step(self, data):
            x, y = data

            def forward():
                y_pred = self(x, training=True)
                return own.mean(own.square(y_pred - y)), y_pred

            loss, y_pred = own.update(self, forward)
            return report(self, y, y_pred, loss)

        def test_step(self, data):
            x, y = data
            y_pred = self(x, training=False)
            return report(self, y, y_pred, own.mean(own.square(y_pred - y)))

    return Model
