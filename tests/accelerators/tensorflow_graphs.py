"""Traces TensorFlow's steps for devices that share no memory, and prints what is in the graphs.

The devices are logical CPU devices of which the package believes that they are GPUs: a step is
traced, and never run with NCCL.
"""

import collections
import contextlib
import gc
import json
import weakref
from unittest import mock

import kerasdist as kd

kd.config.set_logical_cpu_devices(2)

import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

from kerasdist.api.options import CommunicationOptions  # noqa: E402
from kerasdist.backends.tensorflow import internals  # noqa: E402
from kerasdist.backends.tensorflow.replica import all_reduce  # noqa: E402
from tests.conformance import counters  # noqa: E402
from tests.gpu_like import emulation  # noqa: E402

emulation.install("tensorflow")

ROWS, BATCH, WIDTH = 10, 4, 3
X = np.arange(ROWS * WIDTH, dtype="float32").reshape(ROWS, WIDTH)
Y = X.sum(1, keepdims=True)
STRATEGY = kd.MirroredStrategy(["cpu:0", "cpu:1"])
GROUP = STRATEGY.replica_set.group
LAYERS = 3


def trained(optimizer, normalizes=False):
    with STRATEGY.scope():
        layers = [keras.layers.Dense(WIDTH) for _ in range(LAYERS - 1)]
        norm = [keras.layers.BatchNormalization()] if normalizes else []
        model = keras.Sequential([keras.Input((WIDTH,)), *layers, *norm, keras.layers.Dense(1)])
        model.compile(optimizer(), "mse")
    model.make_train_function()
    return model


def graph_of(model, batches=None):
    """The graph of a step, on an iterator or on tensors of an unknown number of rows."""
    steps = model.train_function
    if batches is not None:
        return steps._on_iterator.get_concrete_function(batches).graph
    specs = tf.TensorSpec([None, WIDTH]), tf.TensorSpec([None, 1])
    return steps._on_batch.get_concrete_function(specs).graph


def iterator(dataset=None):
    dataset = dataset or tf.data.Dataset.from_tensor_slices((X, Y)).batch(BATCH)
    return iter(GROUP._iterated(dataset, None))


def operations(graph):
    yield from graph.get_operations()
    for function in graph._functions.values():
        yield from operations(function.graph)


def reductions(graph):
    return [one for one in operations(graph) if one.type == "CollectiveReduceV2"]


def additions(graph):
    """How many values of several devices are added up on one."""
    found = [one for one in operations(graph) if one.type == "AddN"]
    return sum(len({short(part.device) for part in one.inputs}) > 1 for one in found)


def short(device):
    return tf.DeviceSpec.from_string(device).device_index


def sums_by_optimizer():
    """The number of collectives on each device, and of values that one device adds up."""
    adam = keras.optimizers.Adam
    optimizers = {
        "plain": adam,
        "global_clipnorm": lambda: adam(global_clipnorm=1.0),
        "clipnorm": lambda: adam(clipnorm=1.0),
        "loss scale": lambda: keras.optimizers.LossScaleOptimizer(adam()),
        "accumulation": lambda: adam(gradient_accumulation_steps=2, clipvalue=0.5),
    }
    found = {}
    for name, optimizer in optimizers.items():
        graph = graph_of(trained(optimizer))
        by_device = collections.Counter(short(one.device) for one in reductions(graph))
        found[name] = [by_device[0], by_device[1], additions(graph)]
    return found


@contextlib.contextmanager
def like_gpus(pack_bytes=all_reduce.GPU_PACK_BYTES):
    gpus = [None, None]
    with (
        mock.patch.object(all_reduce, "_on_gpus", return_value=True),
        mock.patch.object(all_reduce, "GPU_PACK_BYTES", pack_bytes),
        mock.patch.object(tf.config, "list_physical_devices", return_value=gpus),
    ):
        yield


def normalization():
    """The collectives of synchronized BatchNormalization, what is added up on one device, hints."""
    model = trained(keras.optimizers.SGD, normalizes=True)
    with like_gpus():
        graph = graph_of(model)
    hints = {one.get_attr("communication_hint").decode() for one in reductions(graph)}
    return [len(reductions(graph)), additions(graph), sorted(hints)]


def packs():
    """The sizes of the first device's sums in their order, in packs for GPUs, or as is told."""

    def sizes(options=None):
        columns = [[tf.zeros(size)] * 2 for size in (1, 2, 3, 20)]
        column_options = [] if options is None else [options]

        def sums():
            return GROUP.sums(columns, *column_options, here=False)

        graph = tf.function(sums).get_concrete_function().graph
        return [
            one.inputs[0].shape.num_elements()
            for one in reductions(graph)
            if short(one.device) == 0
        ]

    on_cpus = sizes()
    with like_gpus(pack_bytes=5 * 4):
        told = sizes(CommunicationOptions(bytes_per_pack=3 * 4)), sizes()
    return [on_cpus, *told]


def prefetching():
    """Where pieces wait, and where a step takes them from; where other batches are divided."""
    batches = iterator()
    rows = [[int(part.size), short(part.rows[0].device)] for part in next(batches).parts]
    model = trained(keras.optimizers.SGD)
    taken = [one for one in operations(graph_of(model, batches)) if one.type == "IteratorGetNext"]
    divided = [
        tf.DeviceSpec.from_string(one.device)
        for one in operations(graph_of(model))
        if one.type in ("SplitV", "StridedSlice") and one.outputs[0].shape.rank == 2
    ]
    return {
        "rows": rows,
        "sizes": [[int(part.size) for part in batch.parts] for batch in batches],
        "taken": len({one.inputs[0].name for one in taken}),
        "waits": [
            [taken.index(before) for before in one.control_inputs if before in taken]
            for one in taken
        ],
        "divided": sorted({f"{one.device_type}:{one.device_index}" for one in divided}),
    }


def kinds_of_batches():
    """Which batches wait on devices: no strings, no ragged rows, none whose position is kept."""
    words = tf.data.Dataset.from_tensor_slices([["a"], ["b"], ["c"]]).batch(2)
    ragged = tf.data.Dataset.from_tensor_slices(tf.ragged.constant([[1], [2, 3], []])).batch(2)
    integers = tf.data.Dataset.range(5).batch(2, drop_remainder=True)
    kinds = {
        name: type(iterator(dataset)).__name__ == "PlacedIterator"
        for name, dataset in {"strings": words, "ragged": ragged, "integers": integers}.items()
    }
    dataset = GROUP._iterated(integers, lambda make: make())
    kinds["followed"] = type(iter(dataset)).__name__ == "PlacedIterator"
    return kinds


def retraced():
    """How many functions a second epoch traces; how many feed devices, and outlive the dataset."""
    dataset, feeding = tf.data.Dataset.range(5).batch(2), []
    kind = internals.DEVICE_GENERATOR.value
    begin = kind.__init__

    def noted(feed, *args, **options):
        begin(feed, *args, **options)
        feeding.extend(map(weakref.ref, (feed._init_func, feed._next_func, feed._finalize_func)))

    with mock.patch.object(kind, "__init__", noted):
        batches = GROUP._iterated(dataset, None)
        list(batches)
        with counters.traces("tensorflow") as traces:
            list(batches)
    del batches
    gc.collect()
    return [traces.count, len(feeding), sum(one() is not None for one in feeding)]


def pipelines():
    """Of two epochs: how many pipelines of devices began, and whether they are tuned."""
    begin, found = tf.data.Dataset.__iter__, {}
    for name, source in {
        "arrays": (X, Y, BATCH),
        "dataset": (tf.data.Dataset.from_tensor_slices((X, Y)).batch(BATCH),),
    }.items():
        model, begun = trained(keras.optimizers.SGD), []

        def noted(dataset, begun=begun):
            begun.append(dataset.options().autotune.enabled is not False)
            return begin(dataset)

        with mock.patch.object(tf.data.Dataset, "__iter__", noted):
            model.fit(*source, epochs=2, verbose=0)
        found[name] = [len(begun) // len(GROUP.local), any(begun)]
    return found


def main():
    parts = (
        sums_by_optimizer,
        normalization,
        packs,
        prefetching,
        kinds_of_batches,
        retraced,
        pipelines,
    )
    print(json.dumps({part.__name__: part() for part in parts}))
