"""A user's script: a `MirroredStrategy` at its top, over processes that it starts itself.

It ends with exit code 3, after it has printed what it has as JSON.
"""

import json
import os
import sys

import keras
import numpy as np

import kerasdist as kd

strategy = kd.MirroredStrategy(["cpu:0", "cpu:1"], launcher="processes")
examples = 11


def trained(strategy):
    x = np.arange(3 * examples, dtype="float32").reshape(examples, 3) / 10
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, "linear", False)])
        model.compile("sgd", "mse")
    model.set_weights([np.ones((3, 1))])
    history = model.fit(x, x.sum(1) - 1, batch_size=4, epochs=2, shuffle=False, verbose=0)
    return model.get_weights()[0].ravel().tolist(), history.history["loss"]


if __name__ == "__main__":
    # One after the other, as a second strategy has the same processes; the last one is plain Keras.
    others = (kd.MirroredStrategy(["cpu:0", "cpu:1"]), kd.auto(), kd.get_strategy())
    runs = [trained(each) for each in (strategy, *others)]
    told = {
        "rank": int(os.environ["KERASDIST_RANK"]),
        "devices": [str(each) for each in strategy.extended.worker_devices],
        "replicas": strategy.num_replicas_in_sync,
        "arguments": sys.argv[1:],
        "runs": runs,
    }
    # At once: `print` writes the end of a line by itself, and the other worker's may come between.
    sys.stdout.write(json.dumps(told) + "\n")
    sys.exit(3)
