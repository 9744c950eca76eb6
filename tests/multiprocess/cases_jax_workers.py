"""What is JAX's own on several workers: values of all workers, programs, its processes."""

from unittest import mock

import numpy as np

from kerasdist.job import job as jobs
from tests import environment
from tests.conformance.lazy import LazyModule, kd, keras
from tests.conformance.models import dense, regression
from tests.conformance.registry import case
from tests.facade.lab import numbered

registry = LazyModule("kerasdist.backends.registry")
interface = LazyModule("kerasdist.backends.base.interface")
connection = LazyModule("kerasdist.backends.jax.connection")

JAX = ("jax",)


def local(strategy, value):
    return [np.asarray(one).tolist() for one in strategy.local_results(value)]


@case("workers", backends=JAX)
def values_of_all_workers(lab):
    """Values of other shapes on other workers, made by hand, ragged batches."""
    strategy, replicas = lab.strategy(), lab.replicas
    here = strategy.local_replicas
    value = numbered(strategy, lambda number: np.full(number + 1, 2.0, "float32"))
    total = replicas * (replicas + 1)
    lab.equal([one + 1 for one in here], [len(one) for one in local(strategy, value)])
    lab.equal(total, float(strategy.reduce("SUM", value, axis=0)))
    lab.equal(total, float(np.sum(strategy.gather(value, axis=0))))
    sums = strategy.run(lambda x: kd.get_replica_context().all_reduce("SUM", x.sum()), (value,))
    lab.equal([float(total)] * len(here), local(strategy, sums))
    value = kd.PerReplica(tuple(np.float32(one) for one in here))
    lab.equal(sum(range(replicas)), float(strategy.reduce("SUM", value, axis=None)))
    lab.equal([2.0 * one for one in here], local(strategy, strategy.run(lambda x: x * 2, (value,))))
    with lab.raises(ValueError, "a component for each of the"):
        strategy.reduce("SUM", kd.PerReplica((np.float32(1),) * (replicas + 1)), axis=None)
    batches = [np.arange(size, dtype="float32") for size in (4 * replicas, 5, 1)]
    for batch, value in zip(batches, strategy.distribute_dataset(batches), strict=True):
        lab.equal(batch, strategy.gather(value, axis=0))
        each = strategy.run(lambda x: x.sum(), args=(value,))
        lab.equal(batch.sum(), float(strategy.reduce("SUM", each, axis=None)))


@case("workers", backends=JAX)
def one_worker_alone_between_steps(lab):
    """Whatever one worker does with its model between two calls of `fit`, no other need do it."""
    model = lab.made(dense)
    x, y = regression(7)
    for _ in range(2):
        model.fit(x, y, batch_size=4, verbose=0)
        if lab.job.is_chief:
            lab.equal((2, 1), np.shape(model(x[:2])))
            total = keras.ops.sum(model.weights[0] * 2 + keras.ops.ones(6))
            lab.check(np.isfinite(float(total)), f"{total}")
            model.optimizer.learning_rate.assign(model.optimizer.learning_rate * 1)
            model.count_params()
    lab.check(all(one.value.is_fully_addressable for one in model.weights), "not all is here")


@case("workers", backends=JAX)
def a_tpu_strategy_spans_all_workers(lab):
    """It trains as one device does; a replica has one device, and there are as many as replicas."""
    strategy = kd.TPUStrategy()
    lab.equal(lab.replicas, strategy.num_replicas_in_sync)
    lab.equal(list(lab.strategy().local_replicas), list(strategy.local_replicas))
    lab.equal(lab.job.num_workers, strategy.cluster_resolver.num_workers)
    x, y = regression(10)
    options = {"batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0}
    lab.same(dense, lambda model: model.fit(x, y, **options), strategy=strategy)
    topology = kd.tpu.initialize_tpu_system(kd.cluster_resolver.TPUClusterResolver())
    of_each = lab.replicas // lab.job.num_workers
    lab.equal((lab.job.num_workers, of_each), (topology.num_tasks, topology.num_tpus_per_task))
    place = topology.device_coordinates[lab.job.rank, 0]
    lab.equal(lab.job.rank, topology.task_ordinal_at_coordinates(place))
    build = kd.DeviceAssignment.build
    with lab.raises(kd.errors.UnsupportedError, r"worker \d/\d.*one device per replica"):
        kd.TPUStrategy(experimental_device_assignment=build(2, (2,)))
    with lab.raises(kd.errors.DeviceError, f"each of the {lab.replicas} devices"):
        kd.TPUStrategy(experimental_device_assignment=build(lab.replicas + 1))


@case("workers", backends=JAX)
def refusals_of_jax(lab):
    """Connected after JAX has started, values made in a program, statistics of a part: refused."""
    strategy = lab.strategy()
    try:
        connection.connect(lab.job)
    except kd.errors.JobError as refused:
        lab.check("before JAX starts" in str(refused), f"{refused}")
        lab.check(f"[worker {lab.job.rank}/" in str(refused), f"{refused}")
        lab.check(refused.__suppress_context__, "JAX's own traceback comes first")
    else:
        lab.check(False, "it was not refused")

    def merged(strategy):
        return strategy.distribute_values_from_function(lambda _: np.float32(1))

    with lab.raises(kd.errors.UnsupportedError, "made outside of"):
        strategy.run(lambda: kd.get_replica_context().merge_call(merged))
    with lab.raises(kd.errors.UnsupportedError, "batch_norm"):
        lab.strategy(batch_norm="per_replica")
    # As where JAX knows of other processes, and kerasdist does not.
    backend, devices = registry.current(), strategy.replica_set.devices
    options = interface.ReplicaOptions()
    with mock.patch.object(jobs, "_current", []):
        with lab.raises(kd.errors.JobError, f"all {lab.job.num_workers} processes that JAX knows"):
            backend.replica_set(devices, options)
        with environment.variables(KERASDIST_CLUSTER="none"):
            alone = backend.replica_set(devices, options)
    lab.equal(len(strategy.local_replicas), alone.num_replicas)
