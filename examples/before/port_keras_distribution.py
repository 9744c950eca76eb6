"""`fit` under keras.distribution.DataParallel, on JAX."""

import jax
import keras
from keras import layers
from sklearn.datasets import load_digits

BATCH_SIZE = 64
EPOCHS = 8
TRAINED, TESTED = 1408, 384  # full batches: DataParallel cannot divide a last one of 5

jax.config.update("jax_num_cpu_devices", 2)
distribution = keras.distribution.DataParallel()
keras.distribution.set_distribution(distribution)
keras.utils.set_random_seed(0)

digits = load_digits()
images, labels = (digits.images[..., None] / 16).astype("float32"), digits.target.astype("int32")

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

replicas = distribution.device_mesh.shape[0]
print(f"{replicas} replicas: test accuracy {history.history['val_accuracy'][-1]:.4f}")
