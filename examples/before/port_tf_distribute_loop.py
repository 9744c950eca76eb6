"""A custom training loop of tf.distribute, for TensorFlow alone."""

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

BATCH_SIZE = 64
EPOCHS = 5

tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
)
strategy = tf.distribute.MirroredStrategy(["cpu:0", "cpu:1"])
keras.utils.set_random_seed(0)

digits = load_digits()
images, labels = (digits.data / 16.0).astype("float32"), digits.target.astype("int32")
dataset = tf.data.Dataset.from_tensor_slices((images, labels)).batch(BATCH_SIZE, True)
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
    with tf.GradientTape() as tape:
        logits = model(x, training=True)
        loss = tf.nn.compute_average_loss(loss_object(y, logits), global_batch_size=BATCH_SIZE)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply(gradients, model.trainable_variables)
    accuracy.update_state(y, logits)
    return loss


@tf.function
def train_step(batch):
    losses = strategy.run(replica_step, args=(batch,))
    return strategy.reduce("SUM", losses, axis=None)


for epoch in range(EPOCHS):
    losses = [float(train_step(batch)) for batch in distributed]
    print(f"epoch {epoch + 1}: loss {np.mean(losses):.4f}, accuracy {float(accuracy.result()):.4f}")
    accuracy.reset_state()
print(f"{strategy.num_replicas_in_sync} replicas: loss {np.mean(losses):.4f} in the last epoch")
