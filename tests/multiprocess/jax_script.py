"""One worker of a job on JAX: what only this engine has, case by case, in one process.

python -m tests.multiprocess.jax_script; the environment says which worker. Prints a line a case.
"""

import os
from pathlib import Path

os.environ["KERAS_BACKEND"] = "jax"

import kerasdist as kd

STRATEGY = kd.MultiWorkerMirroredStrategy()

import jax  # noqa: E402
import keras  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402

from kerasdist.backends import registry  # noqa: E402
from kerasdist.backends.base.interface import ReplicaOptions  # noqa: E402
from kerasdist.backends.jax import connection  # noqa: E402
from kerasdist.job import job as jobs  # noqa: E402
from tests.multiprocess.loops import run_cases  # noqa: E402

REPLICAS, HERE = STRATEGY.num_replicas_in_sync, STRATEGY.local_replicas
RANK = jax.process_index()
CASES = []


def case(function):
    CASES.append(function)
    return function


def number():
    return kd.get_replica_context().replica_id_in_sync_group


def local(value):
    return [np.asarray(one).tolist() for one in STRATEGY.local_results(value)]


@case
def gloo_waits_for_its_turn():
    everyone = [os.sched_getscheduler(int(one.name)) for one in Path("/proc/self/task").iterdir()]
    assert os.SCHED_BATCH in everyone, everyone
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


@case
def connected_after_jax_has_started():
    with pytest.raises(kd.errors.JobError, match=r"\[worker \d/2\].* before JAX starts") as refused:
        connection.connect(STRATEGY.replica_set.job)
    assert refused.value.__suppress_context__, "JAX's own traceback comes first"


@case
def of_other_shapes_on_other_workers():
    value = STRATEGY.distribute_values_from_function(
        lambda context: np.full(context.replica_id_in_sync_group + 1, 2.0, "float32")
    )
    total = REPLICAS * (REPLICAS + 1)
    assert [len(one) for one in local(value)] == [one + 1 for one in HERE]
    assert float(STRATEGY.reduce("SUM", value, axis=0)) == total
    assert float(np.sum(STRATEGY.gather(value, axis=0))) == total
    sums = STRATEGY.run(lambda x: kd.get_replica_context().all_reduce("SUM", x.sum()), (value,))
    assert local(sums) == [total] * len(HERE)


@case
def made_by_hand():
    value = kd.PerReplica(tuple(np.float32(one) for one in HERE))
    assert float(STRATEGY.reduce("SUM", value, axis=None)) == sum(range(REPLICAS))
    assert local(STRATEGY.run(lambda x: x * 2, args=(value,))) == [2 * one for one in HERE]
    with pytest.raises(ValueError, match="a component for each of the"):
        STRATEGY.reduce("SUM", kd.PerReplica((np.float32(1),) * (REPLICAS + 1)), axis=None)


@case
def made_inside_a_program():
    def step():
        def merged(strategy):
            return strategy.distribute_values_from_function(lambda _: np.float32(1))

        return kd.get_replica_context().merge_call(merged)

    with pytest.raises(kd.errors.UnsupportedError, match="made outside of"):
        STRATEGY.run(step)


@case
def ragged_batches():
    batches = [np.arange(size, dtype="float32") for size in (4 * REPLICAS, 5, 1)]
    for batch, value in zip(batches, STRATEGY.distribute_dataset(batches), strict=True):
        assert np.array_equal(STRATEGY.gather(value, axis=0), batch)
        total = STRATEGY.reduce("SUM", STRATEGY.run(lambda x: x.sum(), args=(value,)), axis=None)
        assert float(total) == batch.sum()


@case
def variables():
    with STRATEGY.scope():
        mirrored = keras.Variable(np.float32(0), aggregation="sum")
        kept = keras.Variable(np.float32(0), synchronization="on_read", aggregation="sum")

    def step():
        mirrored.assign(number() * 1.0)
        kept.assign_add(number() * 1.0)
        return kept.value + 0

    for count in (1.0, 2.0):
        assert local(STRATEGY.run(step)) == [count * one for one in HERE]
    assert float(mirrored.value) == sum(range(REPLICAS))
    assert float(kept.value) == 2 * sum(range(REPLICAS))
    assert local(kept) == [2.0 * one for one in HERE]
    kept.assign(4.0 * REPLICAS)
    assert local(kept) == [4.0] * len(HERE)


@case
def one_worker_alone_between_steps():
    with STRATEGY.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        model.compile(optimizer="sgd", loss="mse")
    x, y = np.ones((7, 3), "float32"), np.ones((7, 2), "float32")
    for _ in range(2):
        model.fit(x, y, batch_size=4, verbose=0)
        if RANK == 0:  # whatever it does, the other one need not do it
            assert np.shape(model(x[:2])) == (2, 2)
            assert np.isfinite(float(keras.ops.sum(model.weights[0] * 2 + keras.ops.ones(2))))
            model.optimizer.learning_rate.assign(model.optimizer.learning_rate * 1)
            model.count_params()
    assert all(weight.value.is_fully_addressable for weight in model.weights)


@case
def a_tpu_strategy_spans_all_workers():
    strategy = kd.TPUStrategy()
    assert (strategy.num_replicas_in_sync, strategy.local_replicas) == (REPLICAS, HERE)
    assert strategy.cluster_resolver.num_workers == REPLICAS // len(HERE)
    draws = np.random.default_rng(0)
    x, y = (draws.normal(size=(10, width)).astype("float32") for width in (3, 1))

    def trained(scope):
        keras.utils.set_random_seed(3)
        normal = keras.layers.BatchNormalization
        with scope:
            model = keras.Sequential([keras.Input((3,)), normal(), keras.layers.Dense(1)])
            model.compile(keras.optimizers.SGD(0.1), "mse")
        losses = model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0).history["loss"]
        return [losses, *model.get_weights()]

    one_device = kd.OneDeviceStrategy("cpu:0")
    for found, expected in zip(trained(strategy.scope()), trained(one_device.scope()), strict=True):
        np.testing.assert_allclose(found, expected, atol=2e-6)


@case
def a_tpu_strategy_takes_devices_one_by_one():
    build = kd.DeviceAssignment.build
    with pytest.raises(kd.errors.UnsupportedError, match=r"worker \d/2.*one device a replica"):
        kd.TPUStrategy(experimental_device_assignment=build(2, (2,)))
    with pytest.raises(kd.errors.DeviceError, match=f"each of the {REPLICAS} devices"):
        kd.TPUStrategy(experimental_device_assignment=build(REPLICAS + 1))


@case
def processes_of_a_slice_without_a_job():
    devices = STRATEGY.replica_set.devices
    job = jobs._current.pop()  # as where JAX knows of other processes, and kerasdist does not
    try:
        with pytest.raises(kd.errors.JobError, match="all 2 processes that JAX knows"):
            registry.current().replica_set(devices, ReplicaOptions())
        os.environ["KERASDIST_CLUSTER"] = "none"
        assert registry.current().replica_set(devices, ReplicaOptions()).num_replicas == len(HERE)
    finally:
        os.environ.pop("KERASDIST_CLUSTER", None)
        jobs._current.append(job)


@case
def statistics_of_a_part():
    with pytest.raises(kd.errors.UnsupportedError, match="batch_norm"):
        kd.MultiWorkerMirroredStrategy(batch_norm="per_replica")


if __name__ == "__main__":
    run_cases(CASES)
