"""Larger batches for more devices: what happens to the learning rate.

To use more devices well, you need larger global batches, and an epoch then has fewer steps. The
linear rule multiplies the learning rate by the same factor as the batch size. With
`kd.callbacks.LearningRateWarmup` the rate grows to this value over the first epochs (Goyal et al.,
2017). The script trains a convolutional network on digits with batches of 32 to 512, for the same
number of epochs, in three ways.

    KERAS_BACKEND=jax python examples/large_batch_scaling.py --figure scaling.png
"""

import argparse

import keras
import numpy as np
from keras import layers
from sklearn.datasets import load_digits

import kerasdist as kd

BASE_BATCH, BASE_RATE = 32, 0.005
WARMUP_EPOCHS = 2


def build_model(rate: float) -> keras.Model:
    """Return a compiled classifier."""
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(16, 3, activation="relu"),
            layers.Flatten(),
            layers.Dense(64, activation="relu"),
            layers.Dense(10),
        ]
    )
    model.compile(
        optimizer=keras.optimizers.SGD(rate, momentum=0.9),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def draw(path: str, batches: list[int], accuracies: dict[str, list[float]]) -> None:
    """Draw a curve for each rule."""
    import matplotlib.pyplot as plt

    plt.figure(figsize=(6.4, 4), layout="constrained")
    for rule, found in accuracies.items():
        plt.plot(batches, found, marker="o", label=rule)
    plt.xscale("log", base=2)
    plt.xlabel("global batch")
    plt.ylabel("test accuracy")
    plt.legend()
    plt.savefig(path)


def main() -> None:
    """Train with each batch size and rule; print a table of test accuracies."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batches", type=int, nargs="+", default=[32, 128, 512])
    parser.add_argument("--figure", help="a PNG file to write")
    options = parser.parse_args()

    if kd.cluster.detect() is None:  # not a worker of a job
        kd.config.set_logical_cpu_devices(2)  # used where there is no accelerator
    strategy = kd.auto()
    digits = load_digits()
    x = (digits.images[..., np.newaxis] / 16.0).astype("float32")
    y = digits.target.astype("int32")

    def accuracy(batch: int, rate: float, *callbacks: keras.callbacks.Callback) -> float:
        keras.utils.set_random_seed(0)
        with strategy.scope():
            model = build_model(rate)
        model.fit(
            *(x[:1400], y[:1400]),
            batch_size=batch,
            epochs=options.epochs,
            callbacks=list(callbacks),
            verbose=0,
        )
        return model.evaluate(x[1400:], y[1400:], batch_size=397, verbose=0)[1]

    rules = ("same rate", "linear rule", "linear rule and warm-up")
    found: dict[str, list[float]] = {rule: [] for rule in rules}
    print(f"{'batch':>5}  {'  '.join(rules)}")
    for batch in options.batches:
        rate = BASE_RATE * batch / BASE_BATCH
        warmup = kd.callbacks.LearningRateWarmup(rate, epochs=WARMUP_EPOCHS, start=BASE_RATE)
        found[rules[0]].append(accuracy(batch, BASE_RATE))
        found[rules[1]].append(accuracy(batch, rate))
        found[rules[2]].append(accuracy(batch, rate, warmup))
        row = "  ".join(f"{found[rule][-1]:>{len(rule)}.4f}" for rule in rules)
        print(f"{batch:>5}  {row}")

    if options.figure:
        draw(options.figure, options.batches, found)
    print(
        f"{strategy.num_replicas_in_sync} replicas, batch {options.batches[-1]}: accuracy "
        f"{found[rules[2]][-1]:.4f} with warm-up, {found[rules[1]][-1]:.4f} without, "
        f"{found[rules[0]][-1]:.4f} at the same rate"
    )


if __name__ == "__main__":
    main()
