"""What a plan says that devices hold is what they hold, with state that they divide."""

import gc
import re
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest

from tests.conformance.lazy import LazyModule, jax, kd, keras
from tests.facade.case import of_backend

ahead_of_time = LazyModule("kerasdist.backends.jax.ahead_of_time")
backend = LazyModule("kerasdist.backends.jax.backend")
mesh = LazyModule("kerasdist.backends.jax.mesh.layout")
script = LazyModule("kerasdist.cli.plan.script")
case = of_backend("jax")
DEVICES = 4
PARTS = ("trainable", "non_trainable", "optimizer", "metrics")


def planned_and_held(sharding):
    """Bytes of each part of the state on the first device, as planned and after `fit`."""
    with kd.MirroredStrategy([f"cpu:{i}" for i in range(DEVICES)], sharding=sharding).scope():
        layers = [keras.layers.Dense(64, "relu"), keras.layers.Dropout(0.1), keras.layers.Dense(6)]
        model = keras.Sequential([keras.Input((16,)), *layers])
        model.compile(keras.optimizers.Adam(), "mse", metrics=["mae"])
    x, y = np.zeros((8, 16), "float32"), np.zeros((8, 6), "float32")
    model.fit(x, y, batch_size=8, verbose=0)
    layout = mesh.Layout(jax.local_devices(backend="cpu")[:DEVICES], 1, sharding)
    planned = ahead_of_time.training_program(model, (x, y), layout).state_bytes
    parts = model.trainable_variables, model.non_trainable_variables, model.optimizer.variables
    held = [
        sum(variable._value.addressable_data(0).nbytes for variable in variables)
        for variables in (*parts, model.metrics_variables)
    ]
    return planned, dict(zip(PARTS, held, strict=True))


@case
def planned_bytes_are_those_that_a_device_holds(strategy):
    whole, held = planned_and_held(None)
    assert whole == held
    by_optimizer, held = planned_and_held(kd.Sharding("optimizer", min_size=64))
    assert by_optimizer == held
    assert by_optimizer["trainable"] == whole["trainable"]
    assert by_optimizer["optimizer"] < whole["optimizer"] / 3
    full, held = planned_and_held(kd.Sharding("full", min_size=64))
    assert full == held
    assert full["trainable"] < whole["trainable"] / 3


MAPPED = """
import keras
import kerasdist as kd
import numpy as np

devices = [f"cpu:{index}" for index in range(COUNT)]
mesh = keras.distribution.DeviceMesh((COUNT // 2, 2), ("batch", "model"), devices)
layouts = keras.distribution.LayoutMap(mesh)
layouts["KEY"] = layouts[".*other/kernel"] = (None, "model")
with kd.MirroredStrategy(devices, sharding=layouts).scope():
    hidden = [keras.layers.Dense(SIZE, name=f"up_{index}") for index in range(3)]
    model = keras.Sequential([keras.Input((8,)), *hidden, keras.layers.Dense(8, name="down")])
    model.compile("adam", "mse")
    other = keras.Sequential([keras.Input((8,)), keras.layers.Dense(8, name="other")])
x = np.zeros((8, 8), "float32")
model.fit(x, x, batch_size=8)
"""


def described_by_a_plan(key=".*up_\\d/kernel", count=DEVICES, size=8):
    devices = jax.local_devices(backend="cpu")[:DEVICES]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "mapped.py"
        values = {"COUNT": count, "KEY": key, "SIZE": size}
        path.write_text(re.sub("COUNT|KEY|SIZE", lambda found: str(values[found[0]]), MAPPED))
        with mock.patch("sys.argv", []), mock.patch("sys.path", list(sys.path)):
            step = script.first_step(str(path), (), ahead_of_time.PlanningBackend(devices))
        return script.described(step)


@case
def a_plan_says_what_a_map_does(strategy):
    layout = described_by_a_plan()
    expected = ("(None, model)", r"key .*up_\d/kernel", 4 * 8 * 8 // 2)
    assert [row[2:] for row in layout.rows[:6:2]] == [expected] * 3
    assert layout.rows[1][2:4] == ("whole", "no key of the map")
    kernels = 3 * 8 * 8 * 4 * 3  # with Adam's two slots
    assert layout.total_bytes - layout.bytes_a_device == kernels / 2
    first, *_, last = map(list, zip(*(one.cells for one in layout.table(3).columns), strict=True))
    assert [first[0], first[-1]] == ["sequential/up_0/kernel and 2 alike", "384 B"]
    assert last[0] == "17 others"


@case
def a_plan_refuses_a_map_that_does_not_fit(strategy):
    for options, words in (
        ({"key": ".*uq/kernel"}, r"Received: key='\.\*uq/kernel', .*nearest paths are .*up"),
        ({"size": 7}, r"Received: layout=.* for the variable '.*up_0/kernel' of shape \(8, 7\)"),
    ):
        with pytest.raises(kd.errors.InputError, match=words):
            described_by_a_plan(**options)
    with pytest.raises(kd.errors.DeviceError, match=r"LayoutMap over .'cpu:0', 'cpu:1'., devices="):
        described_by_a_plan(count=2)


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
def weights_of_a_file_are_never_whole_on_a_device(strategy):
    """keras#21634: a device that loads a file holds its shards, none of them twice."""
    size, layers = 512, 6
    device = jax.local_devices(backend="cpu")[0]
    names = [f"cpu:{i}" for i in range(DEVICES)]
    mesh_of_map = keras.distribution.DeviceMesh((2, 2), ("batch", "model"), names)
    layouts = keras.distribution.LayoutMap(mesh_of_map)
    layouts[".*kernel"] = ("batch", "model")

    def build():
        dense = [keras.layers.Dense(size, use_bias=False) for _ in range(layers)]
        return keras.Sequential([keras.Input((size,)), *dense])

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.weights.h5"
        build().save_weights(path)
        for sharding in ("full", layouts):
            with kd.MirroredStrategy(names, sharding=sharding).scope():
                model = build()
            gc.collect()  # what earlier cases left would go in between
            before, most = bytes_on(device), 0
            assign = keras.Variable._direct_assign

            def noted(variable, value, assign=assign):
                nonlocal most
                assign(variable, value)
                most = max(most, bytes_on(device))

            with mock.patch.object(keras.Variable, "_direct_assign", noted):
                model.load_weights(path)
            assert 0 < most <= before, (before, most)


@case
def a_topology_has_the_coordinates_of_tpus(strategy):
    """By process and number; of several slices, which all begin at 0, there is a grid."""
    chips = [
        SimpleNamespace(process_index=process, coords=(x, process, 0), core_on_chip=0)
        for process in (1, 0)
        for x in range(2)
    ]
    with mock.patch("jax.devices", return_value=chips):
        found = backend.BACKEND.coordinates("tpu")
    assert found == [[(x, process, 0, 0) for x in range(2)] for process in range(2)]
    with mock.patch("jax.devices", return_value=chips * 2):
        assert backend.BACKEND.coordinates("tpu") is None
    with mock.patch.object(backend.JaxBackend, "coordinates", return_value=found):
        topology = kd.tpu.initialize_tpu_system()
    assert str(topology) == "Topology(mesh_shape=[2, 2, 1, 1], num_tasks=2)"
    assert topology.task_ordinal_at_coordinates((1, 1, 0, 0)) == 1
