"""Cut a model over several devices, for one that does not fit on a single device.

`TPUStrategy` gives a replica several devices, on JAX of any kind. Here two replicas have two
devices each. The batch is divided over the replicas; within a replica the embeddings, the attention
and the dense layers are cut in halves, so that no device holds the whole model. XLA adds the
exchanges. It still trains as on one device, and the script compares.

    KERAS_BACKEND=jax python examples/model_parallel.py

The model and its data are those of gpt_char_lm.py.
"""

import argparse

import keras
import numpy as np
from gpt_char_lm import BATCH_SIZE, CHARACTERS, build_model, load_data

import kerasdist as kd

RULES = {  # for variables by their paths: into how many pieces each axis is cut
    r"embedding(_\d+)?/embeddings": (1, 2),
    r"(query|key|value)/kernel": (1, 2, 1),  # half of the heads
    r"attention_output/kernel": (2, 1, 1),
    r"dense(_\d+)?/kernel": (2, 1),
}


def main() -> None:
    """Train cut and whole, print what a device holds and how the losses differ."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--epochs", type=int, default=2)
    epochs = parser.parse_args().epochs
    if keras.backend.backend() != "jax":
        raise SystemExit("Cutting a model over devices needs JAX: KERAS_BACKEND=jax")

    kd.config.set_logical_cpu_devices(4)  # used where there is no accelerator
    assignment = kd.DeviceAssignment.build(num_replicas=2, computation_shape=(2,))
    strategy = kd.TPUStrategy(experimental_device_assignment=assignment)
    strategy.split_variables(RULES)
    x, y = load_data(1024)

    def fit(model: keras.Model) -> list[float]:
        keras.utils.set_random_seed(1)  # the same order of examples
        history = model.fit(x, y, batch_size=BATCH_SIZE, epochs=epochs, verbose=2)
        return history.history["loss"]

    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = build_model()
    whole = build_model()
    whole.set_weights(model.get_weights())
    losses = fit(model)
    sizes = [
        (np.prod(variable.value.addressable_shards[0].data.shape), np.prod(variable.shape))
        for variable in model.trainable_variables
    ]
    held, everything = np.sum(sizes, axis=0)
    print(f"each device holds {held:.0f} of {everything:.0f} numbers; {len(CHARACTERS)} characters")
    print("once more, on one device")
    difference = np.max(np.abs(np.subtract(losses, fit(whole))))
    print(f"2 replicas of 2 devices: difference of the losses to one device {difference:.1e}")


if __name__ == "__main__":
    main()
