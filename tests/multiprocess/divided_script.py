"""One worker of two whose replicas divide a model's weights; worker 0 alone reads one."""

import numpy as np

import kerasdist as kd

strategy = kd.MultiWorkerMirroredStrategy(sharding=kd.Sharding("full", min_size=1))

import keras  # noqa: E402

with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, name="only")])
    model.compile("adam", "mse")
if strategy.is_chief:
    print(model.weights[0].numpy())
model.fit(np.ones((4, 4)), np.ones((4, 2)), verbose=0)
