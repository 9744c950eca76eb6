"""Train a small GAN on handwritten digits, with a custom loop and two optimizers.

Each step updates the discriminator, then the generator, on every device. What chance decides, the
noise, is part of the data here, so that one device and many do the same; compare:

    KERAS_BACKEND=torch python examples/digits_gan.py
    KERAS_BACKEND=torch python examples/digits_gan.py --replicas 1
"""

import argparse
from typing import Any

import keras
import numpy as np
from keras import layers, ops
from sklearn.datasets import load_digits

import kerasdist as kd

BATCH_SIZE = 60  # the global batch: all devices together; the last of an epoch has 57 examples
NOISE = 16


def load_data() -> tuple[np.ndarray, np.ndarray]:
    """Return images of 8 x 8 pixels in [-1, 1], flat, and noise for the generator, a row each."""
    images = (load_digits().data / 8.0 - 1.0).astype("float32")
    noise = np.random.default_rng(0).normal(size=(len(images), NOISE)).astype("float32")
    return images, noise


def build_generator() -> keras.Model:
    """Return the model from noise to images."""
    return keras.Sequential(
        [
            keras.Input((NOISE,)),
            layers.Dense(64, activation="gelu"),
            layers.Dense(64, activation="tanh"),
        ]
    )


def build_discriminator() -> keras.Model:
    """Return the model from images to a logit: positive for real ones."""
    return keras.Sequential(
        [keras.Input((64,)), layers.Dense(64, activation="gelu"), layers.Dense(1)]
    )


class Trainer:
    """Two models, two optimizers, and the step that trains them against each other."""

    def __init__(self, strategy: kd.Strategy) -> None:
        self.strategy = strategy
        with strategy.scope():
            self.generator = build_generator()
            self.discriminator = build_discriminator()
            self.generator_optimizer = keras.optimizers.Adam(2e-3, beta_1=0.5)
            self.discriminator_optimizer = keras.optimizers.Adam(1e-3, beta_1=0.5)
        self.step = kd.function(self._step)

    def _step(self, batch: Any, size: Any) -> tuple[Any, Any]:
        """Train on one global batch; return both losses, averaged over its examples."""
        losses = self.strategy.run(self._replica_step, args=(batch, size))
        return self.strategy.reduce("SUM", losses, axis=None)

    def _replica_step(self, batch: Any, size: Any) -> tuple[Any, Any]:
        """Do what one replica does with its part; the optimizers sum gradients over all."""
        images, noise = batch

        def average(per_example: Any) -> Any:
            return kd.compute_average_loss(per_example, global_batch_size=size)

        def discriminator_loss() -> Any:
            real: Any = ops.softplus(-self.discriminator(images))
            fake: Any = ops.softplus(self.discriminator(self.generator(noise)))
            return average(real + fake)

        def generator_loss() -> Any:
            return average(ops.softplus(-self.discriminator(self.generator(noise))))

        losses = []
        for loss, model, optimizer in (
            (discriminator_loss, self.discriminator, self.discriminator_optimizer),
            (generator_loss, self.generator, self.generator_optimizer),
        ):
            value, gradients = kd.value_and_grad(loss, model.trainable_variables)
            optimizer.apply(gradients, model.trainable_variables)
            losses.append(value)
        return tuple(losses)

    def fit(self, images: np.ndarray, noise: np.ndarray, epochs: int) -> list[tuple[float, float]]:
        """Train for some epochs; return the mean losses of each."""
        starts = range(0, len(images), BATCH_SIZE)
        batches = [(images[i : i + BATCH_SIZE], noise[i : i + BATCH_SIZE]) for i in starts]
        dataset = self.strategy.distribute_dataset(batches)
        history = []
        for epoch in range(epochs):
            losses = [
                self.step(batch, ops.convert_to_tensor(len(rows[0]), "int32"))
                for batch, rows in zip(dataset, batches, strict=True)
            ]
            means = np.mean([[float(one) for one in pair] for pair in losses], axis=0)
            history.append((float(means[0]), float(means[1])))
            print(f"epoch {epoch + 1}: discriminator {means[0]:.4f}, generator {means[1]:.4f}")
        return history


def main() -> None:
    """Train on CPU devices and print an image of what the generator has learned."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--replicas", type=int, default=2, help="number of CPU devices")
    parser.add_argument("--epochs", type=int, default=20)
    arguments = parser.parse_args()
    # First, because it prepares the CPU devices, which a backend does only before it starts.
    strategy = kd.MirroredStrategy([f"cpu:{i}" for i in range(arguments.replicas)])
    keras.utils.set_random_seed(0)
    images, noise = load_data()
    trainer = Trainer(strategy)
    trainer.fit(images, noise, arguments.epochs)

    made = np.asarray(trainer.generator.predict(noise[:6], verbose=0)).reshape(6, 8, 8)
    shades = np.array(list(" .:-=+*#%@"))
    for row in np.concatenate(list(made), axis=1):
        print("".join(shades[np.clip((row + 1) * 5, 0, 9).astype(int)]))


if __name__ == "__main__":
    main()
