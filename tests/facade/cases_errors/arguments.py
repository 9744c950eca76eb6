"""Errors of arguments, and of models, strategies and devices that do not fit a call."""

import gc
import warnings

import numpy as np

from kerasdist.core import ownership
from tests import environment
from tests.conformance.lazy import kd, keras, ops
from tests.facade.case import case


def net():
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])


def warned_of(call):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        call()
    return [one for one in told if "made in the scope" in str(one.message)]


@case(replicas=(1, 2))
def model_made_outside(lab):
    """A model made outside of the scope gives one warning, at the user's line."""
    data = np.ones((4, 4), "float32"), np.ones((4, 1), "float32")
    gc.collect()
    others = [strategy for strategy in ownership._strategies if not strategy.is_used]
    for other in others:  # of cases before
        other.is_used = True
    strategy = lab.strategy()
    model = net()
    model.compile("sgd", "mse")
    told = warned_of(lambda: (model.fit(*data, verbose=0), model.evaluate(*data, verbose=0)))
    lab.equal([one.filename for one in told], [__file__] * (lab.replicas > 1))
    other = net()
    other.compile("sgd", "mse")
    told_of_batch = warned_of(lambda: (other.train_on_batch(*data), other.test_on_batch(*data)))
    lab.equal([one.filename for one in told_of_batch], [__file__] * (lab.replicas > 1))
    if told:
        lab.check("`train_on_batch` runs" in str(told_of_batch[0].message), "names the call")
        lab.check("`fit` runs on one device" in str(told[0].message), str(told[0].message))
        with strategy.scope(), lab.raises(kd.errors.ScopeError, "in which it is compiled.*Recei"):
            model.compile("sgd", "mse")
    with strategy.scope():
        net()
    plain = net()
    plain.compile("sgd", "mse")
    lab.equal(warned_of(lambda: plain.fit(*data, verbose=0)), [])  # clearly meant


@case
def strategies_of_one_process_in_a_job(lab):
    """A worker that has not joined its job may not make a one-process strategy."""
    job = {"KERASDIST_WORKERS": "2", "KERASDIST_RANK": "1", "KERASDIST_COORDINATOR": "a:1"}
    makers = {
        "MirroredStrategy": kd.MirroredStrategy,
        "OneDeviceStrategy": lambda: kd.OneDeviceStrategy("cpu:0"),
        "CentralStorageStrategy": kd.CentralStorageStrategy,
    }
    with environment.variables(**job):
        for name, make in makers.items():
            pattern = rf"\[worker 1/2\] Expected a strategy over all 2.*Received: {name}.*auto"
            with lab.raises(kd.errors.JobError, pattern):
                make()
        with environment.variables(KERASDIST_CLUSTER="none"):
            lab.equal(kd.cluster.detect(), None)
            lab.equal(kd.OneDeviceStrategy("cpu:0").num_replicas_in_sync, 1)
        with (
            environment.variables(KERASDIST_CLUSTER="some"),
            lab.raises(kd.errors.ClusterError, "KERASDIST_CLUSTER=none.*Received: .*'some'"),
        ):
            kd.auto()


@case(replicas=(1, 2))
def arrays_that_are_no_dataset(lab, strategy):
    """`distribute_dataset` refuses arrays, and takes lists of batches."""
    x, y = np.ones((6, 4), "float32"), np.ones((6, 1), "float32")
    pattern = r"Expected a dataset.*Received: arrays, .*\(6, 4\).*make_numpy_dataset"
    for arrays in (x, (x, y), (x, {"a": y}), ops.convert_to_tensor(x), (x, None)):
        with lab.raises(kd.errors.InputError, pattern):
            strategy.distribute_dataset(arrays)
        with lab.raises(kd.errors.InputError, pattern):
            strategy.distribute_datasets_from_function(lambda _, arrays=arrays: arrays)
    for data in ({"x": x}, "text", 3, None):
        with lab.raises(kd.errors.InputError, "Expected a dataset.*Received: dataset of type"):
            strategy.distribute_dataset(data)
    ragged = strategy.distribute_dataset([(x, y[:4])])
    if lab.replicas > 1:
        with lab.raises(kd.errors.InputError, "Expected all arrays.*Received: shapes"):
            next(iter(ragged))
    lab.still_usable(strategy)
    for batches in ([x, x], [(x, y)], ((x, y), (x, y))):
        lab.equal(len(list(strategy.distribute_dataset(batches))), len(batches))
    rows = strategy.experimental_make_numpy_dataset((x, y)).batch(4)
    lab.equal(len(list(strategy.distribute_dataset(rows))), 2)


@case
def devices_and_arguments_that_are_none(lab):
    """Errors for a missing GPU, a number as `devices`, and `cross_device_ops`."""
    name = lab.backend
    said = rf"Expected a GPU, but the backend {name} sees none.*'cpu:0'.*Received: devices=.*CUDA"
    for make in (lambda: kd.MirroredStrategy(["cuda:0"]), lambda: kd.OneDeviceStrategy("gpu:0")):
        with lab.raises(kd.errors.DeviceError, said):
            make()
    with lab.raises(kd.errors.DeviceError, "Expected a list of the names.*Received: devices=2"):
        kd.MirroredStrategy(2)
    pattern = "Expected a strategy without cross_device_ops.*Received: cross_device_ops=.*Leave"
    for make in (
        lambda: kd.MirroredStrategy(["cpu:0"], "nccl"),
        lambda: kd.MirroredStrategy(cross_device_ops=object()),
    ):
        with lab.raises(kd.errors.UnsupportedError, pattern):
            make()
    with lab.raises(TypeError, "kerasdist.CommunicationOptions or None. Received: .*'NCCL'"):
        kd.MultiWorkerMirroredStrategy(communication_options="NCCL")
    with lab.raises(TypeError, "kerasdist.InputOptions or None. Received: options='FILE'"):
        lab.strategy().distribute_dataset([np.ones(2)], "FILE")
