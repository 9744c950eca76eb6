"""Fine-tune a saved model: first a new head on frozen layers, then with LoRA.

A classifier of the digits 0 to 4, which the script trains and saves, takes the place of a published
model. The script loads it in the scope and trains it on the digits 5 to 9, with 125 examples: first
a new head, with all other layers frozen; then small matrices beside the frozen kernels (LoRA).

    KERAS_BACKEND=tensorflow python examples/transfer_and_lora.py
"""

import argparse
import tempfile
from pathlib import Path

import keras
import numpy as np
from keras import layers
from sklearn.datasets import load_digits

import kerasdist as kd


def load_data() -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Return images and labels of the digits 0 to 4, and of 5 to 9, with labels from 0."""
    digits = load_digits()
    x, y = (digits.data / 16.0).astype("float32"), digits.target.astype("int32")
    return (x[y < 5], y[y < 5]), (x[y >= 5], y[y >= 5] - 5)


def compiled(model: keras.Model, rate: float) -> keras.Model:
    """Return the model, compiled for the layers that are trainable now."""
    model.compile(
        optimizer=keras.optimizers.Adam(rate),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def trainable(model: keras.Model) -> int:
    """Return how many numbers training may change."""
    return sum(int(np.prod(variable.shape)) for variable in model.trainable_variables)


def draw(path: str, accuracies: dict[str, float]) -> None:
    """Draw a bar for each way to fine-tune."""
    import matplotlib.pyplot as plt

    plt.figure(figsize=(6.4, 4), layout="constrained")
    bars = plt.bar(list(accuracies), list(accuracies.values()), width=0.5)
    plt.bar_label(bars, fmt="%.2f")
    plt.ylabel("accuracy on unseen images")
    plt.ylim(0, 1)
    plt.savefig(path)


def main() -> None:
    """Train a base, fine-tune it twice, and print what each step has brought."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--epochs", type=int, default=20)
    default = Path(tempfile.gettempdir()) / "kerasdist_base.keras"
    parser.add_argument("--base", type=Path, default=default, help="where to save the base")
    parser.add_argument("--figure", help="a PNG file to write")
    options = parser.parse_args()

    if kd.cluster.detect() is None:  # not a worker of a job
        kd.config.set_logical_cpu_devices(2)  # used where there is no accelerator
    strategy = kd.auto()
    keras.utils.set_random_seed(0)
    (x_base, y_base), (x, y) = load_data()
    with strategy.scope():
        base = keras.Sequential(
            [
                keras.Input((64,)),
                layers.Dense(64, activation="relu", name="first"),
                layers.Dense(64, activation="relu", name="second"),
                layers.Dense(5, name="head"),
            ]
        )
        compiled(base, 3e-3)
    base.fit(x_base, y_base, batch_size=64, epochs=options.epochs, verbose=0)
    base.save(options.base)  # in a job the chief writes

    with strategy.scope():  # what is to train under the strategy is loaded in its scope
        body = keras.saving.load_model(options.base)
        body.pop()  # the head
        body.trainable = False
        model = keras.Sequential([keras.Input((64,)), body, layers.Dense(5, name="new_head")])
        compiled(model, 3e-3)
    few, rest = slice(0, 125), slice(125, None)
    found: dict[str, float] = {}

    def tune(name: str) -> float:
        model.fit(x[few], y[few], batch_size=25, epochs=options.epochs, verbose=0)
        _, accuracy = model.evaluate(x[rest], y[rest], batch_size=64, verbose=0)
        print(f"{name}: {trainable(model)} trainable numbers, accuracy {accuracy:.4f}")
        found[f"{name}:\n{trainable(model)} trainable numbers"] = accuracy
        return accuracy

    head = tune("a new head")
    with strategy.scope():  # LoRA makes variables
        for name in ("first", "second"):
            body.get_layer(name).trainable = True
            body.get_layer(name).enable_lora(rank=4)  # freezes the kernel
            body.get_layer(name).bias.trainable = False
        compiled(model, 3e-3)
    lora = tune("head and LoRA")
    if options.figure:
        draw(options.figure, found)
    print(
        f"{strategy.num_replicas_in_sync} replicas: accuracy {lora:.4f} after LoRA, "
        f"{head:.4f} before, on {len(x) - 125} unseen images"
    )


if __name__ == "__main__":
    main()
