"""What devices hold of state that they divide while weights are loaded."""

import gc
import tempfile
from pathlib import Path
from unittest import mock

import jax
import keras

import kerasdist as kd
from tests.unit.backends.jax_cases.case import case

DEVICES = 4


def bytes_on(device):
    """Bytes of all arrays on a device, each buffer once."""
    shards = [shard for array in jax.live_arrays() for shard in array.addressable_shards]
    held = {
        shard.data.unsafe_buffer_pointer(): shard.data.nbytes
        for shard in shards
        if shard.device == device
    }
    return sum(held.values())


@case
def weights_of_a_file_are_whole_one_at_a_time(strategy):
    """keras#21634: a device that loads a file holds its shards, and one whole weight beside."""
    size, layers = 512, 6
    device = jax.local_devices(backend="cpu")[0]

    def build():
        dense = [keras.layers.Dense(size, use_bias=False) for _ in range(layers)]
        return keras.Sequential([keras.Input((size,)), *dense])

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.weights.h5"
        build().save_weights(path)
        devices = [f"cpu:{i}" for i in range(DEVICES)]
        with kd.MirroredStrategy(devices, sharding="full").scope():
            model = build()
        gc.collect()  # what earlier cases left would go in between
        before, most = bytes_on(device), 0
        assign = keras.Variable._direct_assign

        def noted(variable, value):
            nonlocal most
            assign(variable, value)
            most = max(most, bytes_on(device))  # `value` is still whole

        with mock.patch.object(keras.Variable, "_direct_assign", noted):
            model.load_weights(path)
    kernel = 4 * size**2
    assert kernel <= most - before <= 1.5 * kernel  # with its own shard, a quarter
