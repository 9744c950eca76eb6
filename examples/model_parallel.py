"""Cut a model over several devices, for one that does not fit on a single device.

`TPUStrategy` works on JAX with devices of any kind, and can give a replica several of them. Here
two replicas have two devices each. The batch is divided over the replicas. Within a replica the two
large layers are cut in halves, the first by columns and the second by rows, so that each device
holds half of each. XLA adds the communication. The script also trains on one device, and compares
the results.

    KERAS_BACKEND=jax python examples/model_parallel.py
"""

import argparse

import keras
import numpy as np
from keras import layers
from sklearn.datasets import load_digits

import kerasdist as kd

RULES = {  # for variables by their paths: into how many pieces each axis is cut
    "up/kernel": (1, 2),
    "up/bias": (2,),
    "down/kernel": (2, 1),
}


def build_model(width: int = 512) -> keras.Model:
    """Return a compiled classifier with two large layers."""
    model = keras.Sequential(
        [
            keras.Input((64,)),
            layers.Dense(width, activation="gelu", name="up"),
            layers.Dense(width, name="down"),
            layers.LayerNormalization(),
            layers.Dense(10),
        ]
    )
    model.compile(
        optimizer=keras.optimizers.Adam(1e-3),  # its state is cut as the variables are
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def draw(path: str, model: keras.Model) -> None:
    """Draw how many weights each device holds, with a colour for each variable."""
    import matplotlib.pyplot as plt

    plt.figure(figsize=(6.4, 4), layout="constrained")
    total = np.zeros(4)
    for variable in model.trainable_variables:
        held = np.zeros(4)
        for shard in variable.value.addressable_shards:
            held[shard.device.id] += shard.data.size
        name = next((rule for rule in RULES if variable.path.endswith(rule)), None)
        plt.bar(range(4), held, bottom=total, label=name)
        total += held
    plt.axhline(model.count_params(), color="grey", linestyle="--", label="the whole model")
    plt.xticks(range(4), [f"device {i}\nreplica {i // 2}" for i in range(4)])
    plt.ylabel("weights")
    plt.legend(loc="lower center", bbox_to_anchor=(0.5, 0.55))
    plt.savefig(path)


def main() -> None:
    """Train cut and whole; print what a device holds, and how the losses differ."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--figure", help="a PNG file to write")
    options = parser.parse_args()
    if keras.backend.backend() != "jax":
        raise SystemExit("Cutting a model over devices needs JAX: KERAS_BACKEND=jax")

    kd.config.set_logical_cpu_devices(4)  # used where there is no accelerator
    assignment = kd.DeviceAssignment.build(num_replicas=2, computation_shape=(2,))
    strategy = kd.TPUStrategy(experimental_device_assignment=assignment)
    strategy.split_variables(RULES)
    digits = load_digits()
    x, y = (digits.data / 16.0).astype("float32"), digits.target.astype("int32")

    def fit(model: keras.Model) -> list[float]:
        keras.utils.set_random_seed(1)  # the same order of examples
        return model.fit(x, y, batch_size=64, epochs=options.epochs, verbose=2).history["loss"]

    with strategy.scope():
        model = build_model()
    whole = build_model()
    whole.set_weights(model.get_weights())
    losses = fit(model)
    pieces = [variable.value.addressable_shards[0].data.size for variable in model.weights]
    print(f"each device holds {sum(pieces)} of {model.count_params()} weights")
    if options.figure:
        draw(options.figure, model)
    print("once more, on one device")
    difference = np.max(np.abs(np.subtract(losses, fit(whole))))
    print(f"2 replicas of 2 devices: difference of the losses to one device {difference:.1e}")


if __name__ == "__main__":
    main()
