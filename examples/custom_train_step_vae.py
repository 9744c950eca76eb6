"""Override `train_step`: a variational autoencoder, with the step of each backend.

A `train_step` is different code on each backend, so this script has three, as Keras's guides write
them for one device. They run unchanged under a strategy, and gradients and metrics are those of the
global batch. The model adds one loss by `add_loss`, and the step adds the other.

    KERAS_BACKEND=tensorflow python examples/custom_train_step_vae.py --figure digits.png
"""

import argparse
from typing import Any

import keras
import numpy as np
from keras import layers, ops
from sklearn.datasets import load_digits

import kerasdist as kd


class Base(keras.Model):  # what the steps of all backends share
    def __init__(self) -> None:
        super().__init__()
        self.encoder = keras.Sequential([layers.Dense(128, activation="gelu"), layers.Dense(16)])
        self.decoder = keras.Sequential(
            [layers.Dense(128, activation="gelu"), layers.Dense(64, activation="sigmoid")]
        )
        self.seeds = keras.random.SeedGenerator(0)
        self.total = keras.metrics.Mean(name="total")

    @property
    def metrics(self) -> list[keras.metrics.Metric]:  # those that the steps update
        return [self.total]

    def call(self, x: Any) -> Any:  # adds the divergence of the codes to the losses
        mean, log_variance = ops.split(self.encoder(x), 2, axis=1)
        divergence = ops.square(mean) + ops.exp(log_variance) - log_variance - 1
        self.add_loss(ops.mean(ops.sum(divergence, axis=1)) / 2)
        noise = keras.random.normal(ops.shape(mean), seed=self.seeds)
        return self.decoder(mean + ops.exp(log_variance / 2) * noise)

    def error(self, x: Any, made: Any) -> Any:
        return 20 * ops.mean(ops.sum(ops.square(x - made), axis=1))


if keras.backend.backend() == "tensorflow":
    import tensorflow as tf

    class VAE(Base):  # with a gradient tape
        def train_step(self, data: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = self.error(data, self(data)) + sum(self.losses)
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply(gradients, self.trainable_variables)
            self.total.update_state(loss)
            return {"total": self.total.result()}

elif keras.backend.backend() == "jax":
    import jax

    class VAE(Base):  # with a function of the state, since a function of JAX's changes nothing
        def train_step(self, state: Any, data: Any) -> Any:
            trainable, other, optimizer, metrics = state

            def loss_and_state(trainable: Any, other: Any) -> Any:
                made, other, losses = self.stateless_call(
                    trainable, other, data, return_losses=True
                )
                return self.error(data, made) + sum(losses), other

            step = jax.value_and_grad(loss_and_state, has_aux=True)
            (loss, other), gradients = step(trainable, other)
            trainable, optimizer = self.optimizer.stateless_apply(optimizer, gradients, trainable)
            metrics = self.total.stateless_update_state(metrics, loss)
            result = self.total.stateless_result(metrics)
            return {"total": result}, (trainable, other, optimizer, metrics)

else:
    import torch

    class VAE(Base):  # with gradients that the variables hold
        def train_step(self, data: Any) -> Any:
            self.zero_grad()
            loss = self.error(data, self(data)) + sum(self.losses)
            loss.backward()
            with torch.no_grad():
                gradients = [variable.value.grad for variable in self.trainable_variables]
                self.optimizer.apply(gradients, self.trainable_variables)
            self.total.update_state(loss)
            return {"total": self.total.result()}


def draw(path: str, images: np.ndarray) -> None:
    """Draw 40 images of 8 x 8 pixels, as five rows."""
    from matplotlib.pyplot import imsave

    apart = np.pad(images.reshape(40, 8, 8), ((0, 0), (1, 1), (1, 1)), constant_values=images.min())
    rows = apart.reshape(5, 8, 10, 10).swapaxes(1, 2).reshape(50, 80)
    imsave(path, np.kron(rows, np.ones((8, 8))), cmap="gray_r")


def main() -> None:
    """Train, and print the loss; with `--figure` draw generated digits."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--figure", help="a PNG file to write")
    options = parser.parse_args()
    if kd.cluster.detect() is None:  # not a worker of a job
        kd.config.set_logical_cpu_devices(2)  # used where there is no accelerator
    strategy = kd.auto()
    keras.utils.set_random_seed(0)
    images = (load_digits().data / 16.0).astype("float32")
    with strategy.scope():
        model = VAE()
        model.compile(optimizer=keras.optimizers.Adam(3e-3))
    history = model.fit(images, batch_size=64, epochs=options.epochs, verbose=2)
    losses = history.history["total"]
    if options.figure:
        codes = np.random.default_rng(0).normal(size=(40, 8)).astype("float32")
        draw(options.figure, np.asarray(model.decoder.predict(codes, verbose=0)))
    replicas = strategy.num_replicas_in_sync
    print(f"{replicas} replicas: loss {losses[-1]:.4f}; in the first epoch it was {losses[0]:.4f}")


if __name__ == "__main__":
    main()
