"""Port `fit` under keras.distribution.DataParallel.

The strategy takes the place of the distribution, and the model is made in its scope. On JAX both
scripts print the same numbers, with shuffling, BatchNormalization and dropout. The port also runs
on TensorFlow and PyTorch, and with batches that cannot be divided evenly over the devices.

    KERAS_BACKEND=jax python examples/port_keras_distribution.py
"""

import argparse

import keras
from keras import layers
from sklearn.datasets import load_digits

import kerasdist as kd

BATCH_SIZE = 64
EPOCHS = 8
TRAINED, TESTED = 1408, 384

if kd.cluster.detect() is None:  # not a worker of a job
    kd.config.set_logical_cpu_devices(2)  # used where there is no accelerator
strategy = kd.auto()
keras.utils.set_random_seed(0)

digits = load_digits()
images, labels = (digits.images[..., None] / 16).astype("float32"), digits.target.astype("int32")

with strategy.scope():
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(32, 3, use_bias=False),
            layers.BatchNormalization(),
            layers.Activation("relu"),
            layers.Flatten(),
            layers.Dropout(0.3),
            layers.Dense(10, activation="softmax"),
        ]
    )
    model.compile(optimizer="adam", loss="sparse_categorical_crossentropy", metrics=["accuracy"])

history = model.fit(
    images[:TRAINED],
    labels[:TRAINED],
    batch_size=BATCH_SIZE,
    epochs=EPOCHS,
    validation_data=(images[-TESTED:], labels[-TESTED:]),
    validation_batch_size=BATCH_SIZE,
    verbose=0,
)
for epoch, loss in enumerate(history.history["loss"]):
    print(f"epoch {epoch + 1}: loss {loss:.4f}")

replicas = strategy.num_replicas_in_sync
print(f"{replicas} replicas: test accuracy {history.history['val_accuracy'][-1]:.4f}")

# A figure of the result.
parser = argparse.ArgumentParser()
parser.add_argument("--figure", help="a PNG file to write")
if figure := parser.parse_args().figure:
    import matplotlib.pyplot as plt

    plt.figure(figsize=(6.4, 4), layout="constrained")
    for name in ("loss", "val_loss", "val_accuracy"):
        plt.plot(range(1, EPOCHS + 1), history.history[name], marker="o", label=name)
    plt.xlabel("epoch")
    plt.legend()
    plt.savefig(figure)
