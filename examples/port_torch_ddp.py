"""Port a loop of DistributedDataParallel.

The model is a Keras model, so `fit` can replace the loop. The process group, the sampler, the
wrapper, the all-reduce of the loss and `if rank == 0` are then no longer needed. `batch_size`
counts the rows of all devices together. On PyTorch both scripts print the same numbers. You can
still start the port with torchrun.

    KERAS_BACKEND=torch python examples/port_torch_ddp.py
"""

import argparse

import keras
from keras import layers
from sklearn.datasets import load_digits

import kerasdist as kd

BATCH_SIZE = 64
EPOCHS = 6
TRAINED = 1408

if kd.cluster.detect() is None:  # not a worker of a job
    kd.config.set_logical_cpu_devices(2)  # used where there is no accelerator
strategy = kd.auto()
keras.utils.set_random_seed(0)

digits = load_digits()
images, labels = (digits.images[..., None] / 16).astype("float32"), digits.target.astype("int64")

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
        optimizer=keras.optimizers.SGD(0.05, momentum=0.9),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )

history = model.fit(
    images[:TRAINED],
    labels[:TRAINED],
    batch_size=BATCH_SIZE,
    epochs=EPOCHS,
    shuffle=False,
    verbose=0,
)
for epoch, loss in enumerate(history.history["loss"]):
    print(f"epoch {epoch + 1}: loss {loss:.4f}")

_, accuracy = model.evaluate(images[TRAINED:], labels[TRAINED:], verbose=0)
print(f"{strategy.num_replicas_in_sync} replicas: test accuracy {accuracy:.4f}")

# A figure of the result.
parser = argparse.ArgumentParser()
parser.add_argument("--figure", help="a PNG file to write")
if figure := parser.parse_args().figure:
    import matplotlib.pyplot as plt

    plt.figure(figsize=(6.4, 4), layout="constrained")
    digits_of = model.predict(images[TRAINED:], verbose=0).argmax(axis=1)
    for number, image in enumerate(images[TRAINED : TRAINED + 36]):
        right = digits_of[number] == labels[TRAINED + number]
        plt.subplot(4, 9, number + 1)
        plt.imshow(image[..., 0], cmap="gray_r")
        plt.title(str(digits_of[number]), color="black" if right else "red")
        plt.axis("off")
    plt.savefig(figure)
