"""`fit` under tf.distribute, for TensorFlow alone."""

import keras
import tensorflow as tf
from keras import layers
from sklearn.datasets import load_digits

BATCH_SIZE_PER_REPLICA = 32
EPOCHS = 6
TRAINED = 1408  # full batches: tf.distribute weights a smaller last one incorrectly

tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
)
strategy = tf.distribute.MirroredStrategy(["cpu:0", "cpu:1"])
batch_size = BATCH_SIZE_PER_REPLICA * strategy.num_replicas_in_sync
keras.utils.set_random_seed(0)

digits = load_digits()
images, labels = (digits.images[..., None] / 16).astype("float32"), digits.target.astype("int32")
dataset = tf.data.Dataset.from_tensor_slices((images[:TRAINED], labels[:TRAINED]))
train = dataset.batch(batch_size).prefetch(tf.data.AUTOTUNE)
dataset = tf.data.Dataset.from_tensor_slices((images[TRAINED:], labels[TRAINED:]))
test = dataset.batch(batch_size).prefetch(tf.data.AUTOTUNE)

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
history = model.fit(train, epochs=EPOCHS, callbacks=[schedule], verbose=0).history
for epoch, (loss, accuracy) in enumerate(zip(history["loss"], history["accuracy"], strict=True)):
    print(f"epoch {epoch + 1}: loss {loss:.4f}, accuracy {accuracy:.4f}")

_, accuracy = model.evaluate(test, verbose=0)
print(f"{strategy.num_replicas_in_sync} replicas: test accuracy {accuracy:.4f}")
