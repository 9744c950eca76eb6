"""Telemetry: what it counts is right, what it does not know it does not tell, it costs nothing."""

import gzip
import json
import math
import tempfile
import time
from pathlib import Path
from unittest import mock

import numpy as np

from tests.conformance.lazy import kd, keras
from tests.conformance.models import dataset_of, dense, regression
from tests.conformance.registry import case

# Five steps an epoch, the last of two examples.
N, BATCH, EPOCHS = 34, 8, 2
X, Y = regression(N)
SLEEP = 0.05
# The fields of a line by kind. Another set of them needs another number of the schema.
HEAD = {"schema", "kind", "time", "worker"}
FIGURES = {"epoch", "step", "steps", "samples", "seconds", "samples_per_s", "mfu"} | {
    "step_ms",
    "share",
}
FIELDS = {
    "start": HEAD
    | {"host", "backend", "workers", "replicas", "devices", "measured", "steps_in_group", "flops"}
    | {"kerasdist", "keras"},
    "window": HEAD | FIGURES | {"memory"},
    "epoch": HEAD | FIGURES,
}


def lines_of(folder, worker=0):
    path = Path(folder) / f"telemetry-worker-{worker}.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def of_kind(lines, kind):
    return [line for line in lines if line["kind"] == kind]


def slow_batches(rows=N, size=BATCH, seconds=SLEEP):
    def batch(index):
        time.sleep(seconds)
        return tuple(array[index * size :][:size] for array in regression(rows))

    return dataset_of(batch, math.ceil(rows / size))


def trained(strategy, folder, data, every=1e9, **options):
    with strategy.scope():
        model = dense("sgd", **options)
    telemetry = kd.callbacks.Telemetry(folder, every=every)
    given = {"x": data} if data is not None else {"x": X, "y": Y, "batch_size": BATCH}
    validation = {"validation_data": (X, Y), "validation_batch_size": BATCH}
    model.fit(**given, **validation, epochs=EPOCHS, verbose=0, callbacks=[telemetry])
    return lines_of(folder)


def require_sound(lab, lines):
    for line in lines:
        lab.equal(sorted(FIELDS[line["kind"]]), sorted(set(line) - {"by_worker", "slowest"}))
        lab.equal(2, line["schema"])
    [start, *measured] = lines
    for line in measured:
        share = line["share"]
        known = [one for one in share.values() if one is not None]
        lab.check(all(0 <= one <= 1 for one in known), f"shares {share}")
        lab.check(math.isclose(sum(known), 1), f"shares {share}")
        for name in ("data", "collectives"):
            lab.equal(start["measured"][name], share[name] is not None)
        if line["samples"] is None:  # Keras's own graph reads them, and nobody says how many
            lab.equal(("tensorflow", 1), (lab.backend, lab.replicas))
        else:
            rate = line["samples_per_s"]
            lab.check(math.isclose(rate * line["seconds"], line["samples"]), str(line))
        median, high = line["step_ms"]["median"], line["step_ms"]["95%"]
        lab.check(0 < median <= high <= 1000 * line["seconds"] + 1e-6, str(line))


@case("callbacks", replicas=(1, 2))
def counts(lab):
    """`Telemetry` counts every example once, in lines and TensorBoard's file, and says the MFU.

    Of devices that are not in its table it says null.
    """
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    replicas = type(lab.strategy().replica_set)
    per_sample, peak = 3 * 2 * (4 * 6 + 6 * 1), lab.replicas * 494.7e12
    for steps, kind in ((1, "NVIDIA H100 80GB HBM3"), (3, None)):
        emulated = mock.patch.object(replicas, "device_kind", return_value=kind)
        with tempfile.TemporaryDirectory() as folder, emulated:
            lines = trained(lab.strategy(), folder, None, 1e-9, steps_per_execution=steps)
            require_sound(lab, lines)
            [start], windows, epochs = (of_kind(lines, one) for one in FIELDS)
            lab.equal(lab.replicas, start["replicas"])
            wanted = (per_sample, peak) if kind else (None, None)
            lab.equal(dict(zip(("per_sample", "peak"), wanted, strict=True)), start["flops"])
            for one in (*windows, *epochs):
                mfu = per_sample * one["samples"] / (one["seconds"] * peak)
                is_right = math.isclose(one["mfu"], mfu) if kind else one["mfu"] is None
                lab.check(is_right, str(one))
            lab.equal([[N, 5]] * EPOCHS, [[one["samples"], one["steps"]] for one in epochs])
            lab.equal(EPOCHS * N, sum(one["samples"] for one in windows))
            lab.check(len(windows) > EPOCHS, "a window is not as short as it may be")
            host = windows[-1]["memory"]["host"]
            lab.check(2**24 < host["bytes"] <= host["peak_bytes"], f"memory {host}")
            [events] = Path(folder).glob("events.out.tfevents.*")
            read = EventAccumulator(str(events)).Reload()
            lab.equal(len(windows), len(read.Scalars("telemetry/samples_per_s")))


def network(name):
    """A small model, and the products of a forward pass of an example by hand."""
    layers = keras.layers
    if name == "dense":
        inputs = keras.Input((6, 12))
        outputs = layers.Dense(3)(layers.Dense(7)(inputs))
        return keras.Model(inputs, outputs), 6 * (12 * 7 + 7 * 3)
    if name == "conv":
        stack = [
            layers.Conv2D(6, (3, 2), strides=2),  # to 4 x 4, 6 of 3 * 2 * 4
            layers.DepthwiseConv2D(3, padding="same", depth_multiplier=2),  # 12 of 3 * 3
            layers.Conv2DTranspose(5, 2, strides=2),  # 4 x 4 x 12, each to 2 * 2 * 5
            layers.Conv1D(4, 3, groups=1, padding="same"),
        ]
        inputs = image = keras.Input((9, 9, 4))
        for layer in stack[:3]:
            image = layer(image)
        outputs = stack[3](layers.Reshape((64, 5))(image))
        by_hand = 16 * 6 * 24 + 16 * 12 * 9 + 16 * 12 * 20 + 64 * 4 * 15
        return keras.Model(inputs, layers.Dropout(0.5)(layers.Flatten()(outputs))), by_hand
    if name == "recurrent":
        inputs = keras.Input((5, 4))
        return keras.Model(inputs, layers.LSTM(3)(inputs)), 5 * 4 * (4 + 3) * 3
    inputs = keras.Input((10, 8))
    attention = layers.MultiHeadAttention(2, 3, flash_attention=False)  # 2 heads of 3
    outputs = attention(inputs, inputs)
    # Queries, keys, values and outputs; scores, and values by their weights.
    return keras.Model(inputs, outputs), 4 * 10 * 8 * 6 + 2 * 2 * 10 * 10 * 3


@case("callbacks", replicas=(2,))
def flops(lab):
    """The FLOPs of dense layers, convolutions and attention are as by hand."""
    from kerasdist.backends.base.interface import ReplicaSet
    from kerasdist.callbacks import telemetry

    for name in ("dense", "conv", "attention", "recurrent"):
        model, products = lab.made(lambda name=name: network(name))
        devices = mock.Mock(ReplicaSet, devices=[0] * lab.replicas, num_workers=1)
        devices.device_kind.return_value = "Tesla V100-SXM2-32GB"
        found = telemetry.flops_of(model, devices)
        # A loop in a TensorFlow graph does not report how often it runs.
        is_known = (lab.backend, name) != ("tensorflow", "recurrent")
        by_hand = telemetry.Flops(6 * products if is_known else None, lab.replicas * 15.7e12)
        lab.check(found == by_hand, f"{name}: {found}, not {by_hand}")
    with lab.strategy().scope():
        of_any_length = keras.Sequential([keras.Input((None, 4)), keras.layers.Dense(1)])
    devices = mock.Mock(ReplicaSet, devices=[0], num_workers=1)
    for kind, peak in (("TPU v5 lite", 197e12), ("NVIDIA H100 PCIe", None)):
        devices.device_kind.return_value = kind
        lab.check(telemetry.flops_of(of_any_length, devices) == telemetry.Flops(None, peak), kind)


@case("callbacks", replicas=(1, 2))
def waits(lab):
    """`Telemetry` finds how long training waits for data, where that is measured."""
    with tempfile.TemporaryDirectory() as folder:
        lines = trained(lab.strategy(), folder, slow_batches())
    require_sound(lab, lines)
    for epoch in of_kind(lines, "epoch"):
        share = epoch["share"]["data"]
        if share is None:
            lab.equal(("tensorflow", 1), (lab.backend, lab.replicas))
            continue
        slept = epoch["steps"] * SLEEP
        # Batches may be read ahead, by the prefetching of tf.data.
        lab.check(0.3 * slept <= share * epoch["seconds"], f"{epoch} for {slept} s")


@case("callbacks", replicas=(2,))
def asks_for_no_logs(lab):
    """`Telemetry` acts on no batch: callbacks that do make the host wait for each step."""
    from kerasdist import keras_compat

    with tempfile.TemporaryDirectory() as folder:
        telemetry = kd.callbacks.Telemetry(folder, tensorboard=False)
        lab.check(not keras_compat.overrides(telemetry, keras_compat.BATCH_EVENTS), "it does")
        with lab.raises(ValueError, "positive number of seconds.*every=0"):
            kd.callbacks.Telemetry(folder, every=0)
        # Outside of a scope nothing is measured.
        x, y = regression(N)
        with lab.raises(kd.errors.UnsupportedError, "made in a strategy's scope.*OneDevice"):
            dense("sgd").fit(x, y, verbose=0, callbacks=[telemetry])
        with (
            mock.patch("importlib.util.find_spec", return_value=None),
            lab.raises(kd.errors.UnsupportedError, "pip install tensorboard"),
        ):
            kd.callbacks.Telemetry(folder, tensorboard=True)


@case("callbacks", replicas=(2,))
def same_training(lab):
    """`Telemetry` changes nothing in training; with a failure in between, either."""

    def weights(callbacks):
        keras.utils.set_random_seed(3)
        model = lab.made(lambda: dense("adam"))
        model.fit(X, Y, batch_size=BATCH, epochs=2, verbose=0, callbacks=callbacks)
        return [np.array(one) for one in model.get_weights()]

    class Fails(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            raise ZeroDivisionError

    with tempfile.TemporaryDirectory() as folder:
        telemetry = kd.callbacks.Telemetry(folder)
        with lab.raises(ZeroDivisionError, ""):
            weights([Fails(), telemetry])
        before = len(lines_of(folder))
        plain = weights([])
        lab.equal(before, len(lines_of(folder)))
        lab.equal(plain, weights([telemetry]))


@case("callbacks", replicas=(2,))
def profile(lab):
    """`kerasdist run --profile 10:20` shows just the steps asked for, timed by the wall clock."""
    from kerasdist.job.launcher import ProfiledSteps

    with tempfile.TemporaryDirectory() as folder:
        steps = ProfiledSteps(3, 5, Path(folder))
        x, y = regression(N)
        model = lab.made(lambda: dense("sgd"))
        before = time.time_ns() / 1e3
        with mock.patch("kerasdist.job.launcher.wanted", return_value=steps):
            model.fit(x, y, batch_size=BATCH, epochs=2, verbose=0)
        after = time.time_ns() / 1e3
        with gzip.open(steps.of_worker(0)) as file:
            trace = json.load(file)
    lab.equal([3, 5], trace["kerasdist"]["steps"])
    timed = [one for one in trace["traceEvents"] if one["ph"] == "X"]
    ours = [one for one in timed if one["pid"] == "steps of fit"]
    lab.check([one["name"] for one in ours] == ["step 4", "step 5"], f"{ours}")
    seen = [one for one in timed if one["pid"] != "steps of fit"]
    begins = sorted(one["ts"] for one in seen)
    lab.check(len(seen) > 20, f"{len(seen)} events of the framework")
    lab.check(before < begins[0] and begins[-1] < after, f"{before} {begins[0]} {after}")
    # The framework is at work in the steps, by the same clock: at most 20 ms apart.
    first, last = ours[0]["ts"], ours[-1]["ts"] + ours[-1]["dur"]
    inside = [one for one in begins if first - 2e4 < one < last + 2e4]
    lab.check(len(inside) > len(begins) / 2, f"{len(inside)} of {len(begins)} in the steps")


@case("callbacks", replicas=(2,))
def telemetry_on_a_full_disk(lab):
    """A full disk takes no line of telemetry: a warning says so, and training goes on."""
    model = lab.made(lambda: dense("sgd"))
    with tempfile.TemporaryDirectory() as folder, lab.told("takes no more lines") as said:
        Path(folder, "telemetry-worker-0.jsonl").symlink_to("/dev/full")
        telemetry = kd.callbacks.Telemetry(folder, every=1e9)
        history = model.fit(X, Y, epochs=EPOCHS, verbose=0, callbacks=[telemetry])
    lab.equal(history.epoch, list(range(EPOCHS)))
    lab.check("No space left on device" in said[0], f"{said}")
