"""Loads a model's weights within a limit of memory below all of them.

python -m tests.multiprocess.weights_script make FOLDER WEIGHTS MIB
KERAS_BACKEND=... python -m kerasdist run --workers 2 -m tests.multiprocess.weights_script load FILE

What is limited are the private writable pages of a process (``RLIMIT_DATA``): address space, which
``ulimit -v`` limits, is reserved by frameworks in amounts that have nothing to do with a model.
"""

import json
import resource
import sys
from pathlib import Path

import h5py
import keras
import numpy as np

import kerasdist as kd

MIB = 1 << 20
# Beside shards and one variable: threads, whose stacks count whole, and what libc keeps; on JAX
# compiled programs too.
MORE = {"torch": 48, "jax": 148}


def made(weights, mib):
    """A model with so many weights of so many MiB; rows that no number of workers divides."""
    width = 1 << 10
    model = keras.Sequential([keras.Input((width,))])
    for _ in range(weights // 2):
        model.add(keras.layers.Dense(mib * MIB // 4 // width, use_bias=False))
        model.add(keras.layers.Dense(width, use_bias=False))
    return model


def make(folder, weights, mib):
    model = made(weights, mib)
    model.save_weights(folder / "one.weights.h5")
    model.save_weights(folder / "index.weights.json", max_shard_size=2.5 * mib / 1024)
    (folder / "sizes.json").write_text(json.dumps([weights, mib]))


def status(key):
    return int(Path("/proc/self/status").read_text("ascii").split(f"{key}:")[1].split()[0]) / 1024


def load(path, by):
    weights, mib = json.loads((path.parent / "sizes.json").read_text())
    workers = kd.MultiWorkerMirroredStrategy
    if by == "map":
        mesh = keras.distribution.DeviceMesh((2, 1), ("batch", "model"), ["cpu:0", "cpu:1"])
        layouts = keras.distribution.LayoutMap(mesh)
        layouts[".*kernel"] = ("batch", None)
        strategy = workers(sharding=layouts)
    else:
        strategy = workers(sharding="full")
    shards = weights * mib / strategy.num_replicas_in_sync
    with strategy.scope():
        small = made(2, 1)  # what is imported, compiled and started once
        small.save_weights(path.parent / f"small-{strategy.is_chief}.weights.h5")
        small.load_weights(path.parent / "small-True.weights.h5")
    before, limit = status("VmRSS"), shards + mib + MORE[keras.backend.backend()]
    assert limit < 0.9 * weights * mib
    data = resource.RLIMIT_DATA
    resource.setrlimit(data, (int((status("VmData") + limit) * MIB), resource.RLIM_INFINITY))
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM counts anew
    with strategy.scope():
        model = made(weights, mib)
        model.load_weights(path)
    most = status("VmHWM") - before
    resource.setrlimit(data, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    print(f"at most {most:.0f} MiB, shards and one variable {shards + mib:.0f}", flush=True)
    assert most < limit, (most, limit)
    with h5py.File(path.parent / "one.weights.h5") as whole:
        for number, variable in enumerate(model.weights):
            place = f"dense_{number}" if number else "dense"
            value = keras.ops.convert_to_numpy(variable)
            np.testing.assert_array_equal(value, whole[f"layers/{place}/vars/0"][()])


if __name__ == "__main__":
    what, where, *more = sys.argv[1:]
    if what == "make":
        make(Path(where), *map(int, more))
    else:
        load(Path(where), *more)
