"""Train a small GAN on handwritten digits, with a custom loop and two optimizers.

Each step updates the discriminator, then the generator, on every device. The noise for the
generator is part of the data, so one device and several use the same noise. The last batch of an
epoch is smaller than the others. The script trains once more on one device, and compares the
results.

    KERAS_BACKEND=torch python examples/digits_gan.py --figure made.png
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


class Trainer:
    """Two models, two optimizers, and the step that trains them against each other."""

    def __init__(self, strategy: kd.Strategy) -> None:
        keras.utils.set_random_seed(0)  # the same initial weights each time
        self.strategy = strategy
        with strategy.scope():
            self.generator = keras.Sequential(  # from noise to images of 8 x 8 pixels
                [
                    keras.Input((NOISE,)),
                    layers.Dense(64, activation="gelu"),
                    layers.Dense(64, activation="tanh"),
                ]
            )
            self.discriminator = keras.Sequential(  # from images to a logit: positive for real ones
                [keras.Input((64,)), layers.Dense(64, activation="gelu"), layers.Dense(1)]
            )
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

    def fit(self, images: np.ndarray, noise: np.ndarray, epochs: int) -> np.ndarray:
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
            print(f"epoch {epoch + 1}: discriminator {means[0]:.4f}, generator {means[1]:.4f}")
            history.append(means)
        return np.array(history)


def draw(path: str, images: np.ndarray) -> None:
    """Draw 40 images of 8 x 8 pixels, as five rows."""
    from matplotlib.pyplot import imsave

    apart = np.pad(images.reshape(40, 8, 8), ((0, 0), (1, 1), (1, 1)), constant_values=images.min())
    rows = apart.reshape(5, 8, 10, 10).swapaxes(1, 2).reshape(50, 80)
    imsave(path, np.kron(rows, np.ones((8, 8))), cmap="gray_r")


def main() -> None:
    """Train on all devices, then on one; print how much the losses differ."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--figure", help="a PNG file to write")
    options = parser.parse_args()
    if kd.cluster.detect() is None:  # not a worker of a job
        kd.config.set_logical_cpu_devices(2)  # used where there is no accelerator
    strategy = kd.auto()
    images = (load_digits().data / 8.0 - 1.0).astype("float32")
    noise = np.random.default_rng(0).normal(size=(len(images), NOISE)).astype("float32")
    trainer = Trainer(strategy)
    losses = trainer.fit(images, noise, options.epochs)
    if options.figure:
        draw(options.figure, np.asarray(trainer.generator.predict(noise[:40], verbose=0)))

    print("once more, on one device")
    one = kd.OneDeviceStrategy(strategy.extended.worker_devices[0])
    alone = Trainer(one).fit(images, noise, options.epochs)
    difference = np.max(np.abs(losses - alone))
    print(f"{strategy.num_replicas_in_sync} replicas: difference to one device {difference:.1e}")


if __name__ == "__main__":
    main()
