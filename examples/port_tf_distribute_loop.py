"""Port a custom training loop of tf.distribute.

The loop keeps its structure: `run`, `reduce`, a distributed dataset. `kd.value_and_grad` replaces
the gradient tape. The other names stay the same, with `kd.` in place of `tf.`. On TensorFlow both
scripts print the same numbers. The port also runs on JAX and PyTorch, and with several workers.

    KERAS_BACKEND=jax python examples/port_tf_distribute_loop.py
"""

import argparse

import keras
import numpy as np
from sklearn.datasets import load_digits

import kerasdist as kd

BATCH_SIZE = 64
EPOCHS = 5

if kd.cluster.detect() is None:  # not a worker of a job
    kd.config.set_logical_cpu_devices(2)  # used where there is no accelerator
strategy = kd.auto()
keras.utils.set_random_seed(0)

digits = load_digits()
images, labels = (digits.data / 16.0).astype("float32"), digits.target.astype("int32")
dataset = strategy.experimental_make_numpy_dataset((images, labels)).batch(BATCH_SIZE, True)
distributed = strategy.experimental_distribute_dataset(dataset)

with strategy.scope():
    model = keras.Sequential(
        [keras.Input((64,)), keras.layers.Dense(64, "relu"), keras.layers.Dense(10)]
    )
    optimizer = keras.optimizers.Adam(3e-3)
    optimizer.build(model.trainable_variables)
    accuracy = keras.metrics.SparseCategoricalAccuracy()
    loss_object = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")


def replica_step(batch):
    x, y = batch

    def loss_and_logits():
        logits = model(x, training=True)
        loss = kd.compute_average_loss(loss_object(y, logits), global_batch_size=BATCH_SIZE)
        return loss, logits

    (loss, logits), gradients = kd.value_and_grad(
        loss_and_logits, model.trainable_variables, has_aux=True
    )
    optimizer.apply(gradients, model.trainable_variables)
    accuracy.update_state(y, logits)
    return loss


@kd.function
def train_step(batch):
    losses = strategy.run(replica_step, args=(batch,))
    return strategy.reduce("SUM", losses, axis=None)


for epoch in range(EPOCHS):
    losses = [float(train_step(batch)) for batch in distributed]
    print(f"epoch {epoch + 1}: loss {np.mean(losses):.4f}, accuracy {float(accuracy.result()):.4f}")
    accuracy.reset_state()
print(f"{strategy.num_replicas_in_sync} replicas: loss {np.mean(losses):.4f} in the last epoch")

# A figure of the result.
parser = argparse.ArgumentParser()
parser.add_argument("--figure", help="a PNG file to write")
if figure := parser.parse_args().figure:
    import matplotlib.pyplot as plt
    from sklearn.metrics import ConfusionMatrixDisplay

    _, axes = plt.subplots(figsize=(6.4, 4), layout="constrained")
    predicted = model.predict(images, verbose=0).argmax(axis=1)
    ConfusionMatrixDisplay.from_predictions(
        *(labels, predicted), cmap="Blues", ax=axes, colorbar=False
    )
    axes.set_aspect("auto")
    plt.savefig(figure)
