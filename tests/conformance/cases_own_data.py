"""TensorFlow: models without `call`, and data that `call` does not take, for a step of their own.

Plain Keras runs no model before its first step there; on JAX and torch it always does, and asks for
a model that is built.
"""

import numpy as np

from tests.conformance.actions import fit
from tests.conformance.lazy import keras, tf
from tests.conformance.models import compiled, largest_error
from tests.conformance.registry import case

N, BATCH = 11, 4
TENSORFLOW = ("tensorflow",)
X = np.random.RandomState(0).randn(N, 3).astype("float32")


def autoencoder(metrics, **options):
    """The pattern of keras.io's VAE: parts, a step, trackers, no `call`."""

    class Auto(keras.Model):
        def __init__(self):
            super().__init__()
            layers = [keras.layers.Dense(4, "tanh"), keras.layers.BatchNormalization()]
            self.encoder = keras.Sequential(layers)
            self.decoder = keras.Sequential([keras.layers.Dense(3)])
            self.tracker = keras.metrics.Mean(name="distance")

        @property
        def metrics(self):
            return [self.tracker, *super().metrics]

        def _predicted(self, data, training):
            return self.decoder(self.encoder(data["given"], training=training))

        def train_step(self, data):
            with tf.GradientTape() as tape:
                predicted = self._predicted(data, training=True)
                loss = self.compute_loss(y=data["wanted"], y_pred=predicted)
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            self.tracker.update_state(loss)
            return self.compute_metrics(None, data["wanted"], predicted)

        def test_step(self, data):
            predicted = self._predicted(data, training=False)
            self.tracker.update_state(tf.reduce_mean((predicted - data["wanted"]) ** 2))
            return self.compute_metrics(None, data["wanted"], predicted)

        def predict_step(self, data):
            return self._predicted(data, training=False)

    optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
    return compiled(Auto(), optimizer, "mse", metrics=metrics, **options)


def batches():
    return tf.data.Dataset.from_tensor_slices({"given": X, "wanted": 2 * X}).batch(BATCH)


def used(model):
    return [
        fit(batches)(model),
        model.evaluate(batches(), verbose=0, return_dict=True),
        model.predict(batches(), verbose=0),
    ]


@case("steps of their own", backends=TENSORFLOW)
def nothing_built_eagerly(lab):
    """A model without `call`, of parts that the first step builds, eagerly and as a graph."""
    lab.same(lambda: autoencoder(["mae"], run_eagerly=True), used)
    lab.same(lambda: autoencoder(["mae", largest_error()]), used)


@case("steps of their own", backends=TENSORFLOW)
def pairs(lab):
    """Pairs of anchors and positives for a functional model that takes one, and a compiled loss."""

    def build():
        class Pairs(keras.Model):
            def train_step(self, data):
                with tf.GradientTape() as tape:
                    loss = self.compute_loss(y=self(data[:, 0]), y_pred=self(data[:, 1]))
                variables = self.trainable_variables
                gradients = tape.gradient(loss, variables)
                self.optimizer.apply_gradients(zip(gradients, variables, strict=True))
                return {"loss": loss}

        inputs = keras.Input((3,))
        model = Pairs(inputs, keras.layers.Dense(2)(inputs))
        return compiled(model, keras.optimizers.SGD(0.1), "mse")

    lab.same(build, fit(np.stack([X, X[::-1]], 1), batch_size=BATCH, shuffle=False))
