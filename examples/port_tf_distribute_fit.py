"""Port `fit` under tf.distribute.

The strategy's name stays the same, and `fit` gets the arrays themselves: it splits every batch over
the devices, also a smaller last batch. If TensorFlow is installed, a `tf.data.Dataset` would work
as well. On TensorFlow both scripts print the same numbers.

    KERAS_BACKEND=torch python examples/port_tf_distribute_fit.py
"""

import argparse

import keras
from keras import layers
from sklearn.datasets import load_digits

import kerasdist as kd

BATCH_SIZE_PER_REPLICA = 32
EPOCHS = 6
TRAINED = 1408

if kd.cluster.detect() is None:  # not a worker of a job
    kd.config.set_logical_cpu_devices(2)  # used where there is no accelerator
strategy = kd.auto()
batch_size = BATCH_SIZE_PER_REPLICA * strategy.num_replicas_in_sync
keras.utils.set_random_seed(0)

digits = load_digits()
images, labels = (digits.images[..., None] / 16).astype("float32"), digits.target.astype("int32")

with strategy.scope():
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(32, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(64, activation="relu"),
            layers.Dense(10),
        ]
    )
    model.compile(
        optimizer="adam",
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )


def rate(epoch):
    return 3e-3 if epoch < 4 else 3e-4


schedule = keras.callbacks.LearningRateScheduler(rate)
history = model.fit(
    images[:TRAINED],
    labels[:TRAINED],
    batch_size=batch_size,
    epochs=EPOCHS,
    shuffle=False,
    callbacks=[schedule],
    verbose=0,
).history
for epoch, (loss, accuracy) in enumerate(zip(history["loss"], history["accuracy"], strict=True)):
    print(f"epoch {epoch + 1}: loss {loss:.4f}, accuracy {accuracy:.4f}")

_, accuracy = model.evaluate(images[TRAINED:], labels[TRAINED:], batch_size=batch_size, verbose=0)
print(f"{strategy.num_replicas_in_sync} replicas: test accuracy {accuracy:.4f}")

# A figure of the result.
parser = argparse.ArgumentParser()
parser.add_argument("--figure", help="a PNG file to write")
if figure := parser.parse_args().figure:
    import matplotlib.pyplot as plt

    plt.figure(figsize=(6.4, 4), layout="constrained")
    for name in ("loss", "accuracy"):
        plt.plot(range(1, EPOCHS + 1), history[name], marker="o", label=name)
    plt.xlabel("epoch")
    plt.legend()
    plt.savefig(figure)
