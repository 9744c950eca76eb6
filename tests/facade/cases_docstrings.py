"""The examples of tf.distribute's docstrings that no other case holds (`coverage.COVERED_BY`)."""

import collections
import json

import numpy as np

from tests.conformance.lazy import kd, keras, ops
from tests.facade.case import case
from tests.facade.lab import FLOAT32


@case
def central_storage(lab):
    """`CentralStorageStrategy` runs a function on batches of any size, and reduces the results."""
    strategy = kd.CentralStorageStrategy(lab.devices, "cpu:0")
    rows = np.arange(8, dtype="int32")
    dataset = strategy.experimental_distribute_dataset([rows, rows[:1]])
    train_step = kd.function(lambda value: value + 1)
    results = []
    with strategy.scope():
        for batch in dataset:
            results.append(strategy.run(train_step, args=(batch,)))
    lab.equal([[1, 2, 3, 4], [5, 6, 7, 8]], lab.components(results[0], strategy))
    lab.equal([1], np.concatenate(lab.components(results[1], strategy)))
    lab.equal([6, 8, 10, 12], strategy.reduce(kd.ReduceOp.SUM, results[0], axis=None))
    lab.equal(36, strategy.reduce(kd.ReduceOp.SUM, results[0], axis=0))


@case
def where_code_runs(lab, strategy):
    """`has_strategy` and similar functions are right outside of scopes, in scopes and in `run`."""

    def where():
        here = kd.get_replica_context()
        return kd.has_strategy(), kd.in_cross_replica_context(), here is None

    seen = []

    def step():
        seen.append((*where(), kd.get_strategy() is strategy))
        return 1.0

    lab.equal((False, False, False), where())
    lab.equal(1, kd.get_strategy().num_replicas_in_sync)
    strategy.run(step)
    with strategy.scope():
        lab.equal((True, True, True), where())
        lab.check(kd.get_strategy() is strategy, "another strategy is said to be in force")
        strategy.run(step)
    lab.equal((False, False, False), where())
    lab.check(kd.get_strategy() is not strategy, "the scope has ended")
    lab.equal({(True, False, False, True)}, set(seen))


@case
def colocated_variables(lab, strategy):
    """`colocate_vars_with` makes variables beside another, for `extended.update`."""
    with strategy.scope():
        first = keras.Variable(1.0)
        with strategy.extended.colocate_vars_with(first):
            second, third = keras.Variable(2.0), keras.Variable(3.0)
        strategy.extended.update(
            first, lambda v1, v2, v3: v1.assign(v2 * 10.0 + v3), args=(second, third)
        )
    lab.equal([23.0, 23.0], lab.components(first, strategy))


@case
def values_made_in_a_function(lab, strategy):
    """A compiled function may make distributed values and pass them to `run`."""

    def step(x, number):
        return x * 2, kd.get_replica_context().all_reduce("sum", number)

    @kd.function
    def compiled():
        make = strategy.experimental_distribute_values_from_function
        counts = make(lambda context: context.num_replicas_in_sync)
        numbers = make(
            lambda context: ops.convert_to_tensor(context.replica_id_in_sync_group, "int32")
        )
        return strategy.run(step, args=(counts, numbers))

    doubled, total = compiled()
    # Equal in all replicas: it may come out as one tensor.
    lab.equal({4}, {int(one) for one in lab.components(doubled, strategy)})
    lab.equal([1, 1], lab.components(total, strategy))


@case
def devices_of_components(lab, strategy):
    """Each component is on its replica's device; a reduced value is one tensor."""
    result = strategy.run(
        lambda: ops.convert_to_tensor(kd.get_replica_context().replica_id_in_sync_group)
    )
    devices = [lab.device(one) for one in strategy.experimental_local_results(result)]
    # PyTorch has one CPU device, whatever the number of replicas.
    lab.equal(["cpu:0", "cpu:0" if lab.backend == "torch" else "cpu:1"], devices)
    total = strategy.reduce("SUM", result, axis=None)
    lab.equal(1, len(strategy.experimental_local_results(total)))
    lab.equal("cpu:0", lab.device(total))


@case
def options_of_a_run(lab, strategy):
    """`run` takes kerasdist's and tf.distribute's `RunOptions`, and refuses anything else."""
    names = "enable_dynamic_batch_size bucketizing_dynamic_shape xla_options"
    tf_options = collections.namedtuple(
        "RunOptions",
        [f"experimental_{name}" for name in names.split()],
        module="tensorflow.python.distribute.distribute_lib",
    )
    step = kd.function(ops.sum)
    lab.equal(3.0, step(ops.convert_to_tensor([1.0, 2.0])))
    [batch] = strategy.experimental_distribute_dataset([np.arange(2, dtype="float32")])

    def run(options):
        return lab.components(strategy.run(step, args=(batch,), options=options), strategy)

    bucketizing = kd.RunOptions(experimental_bucketizing_dynamic_shape=True)
    for options in (None, kd.RunOptions(), bucketizing, tf_options(True, True, None)):
        lab.equal([0.0, 1.0], run(options))
    with lab.raises(
        TypeError, r"Expected options to be kerasdist.RunOptions or.*Received: options=\(1,\)"
    ):
        run((1,))
    with lab.raises(kd.errors.UnsupportedError, "experimental_xla_options='o'.*XLA_FLAGS"):
        run(kd.RunOptions(experimental_xla_options="o"))


@case
def distributed_values(lab):
    """`run` and `reduce` take values that come from a dataset or from `run`."""
    strategy = kd.MirroredStrategy(lab.devices)
    dataset = strategy.experimental_make_numpy_dataset(np.arange(5.0, 9.0, dtype="float32"))
    batches = iter(strategy.experimental_distribute_dataset(dataset.batch(2)))
    values = next(batches)
    lab.check(isinstance(values, kd.DistributedValues), "a DistributedValues")
    lab.equal([[5.0], [6.0]], lab.components(values, strategy))
    lab.check(str(values).startswith("PerReplica:{\n  0: "), f"{values}")

    @kd.function
    def number():
        return kd.get_replica_context().replica_id_in_sync_group + 0

    lab.equal([0, 1], lab.components(strategy.run(number), strategy))
    more = strategy.run(kd.function(lambda value: value + 1.0), args=(values,))
    lab.equal([[6.0], [7.0]], lab.components(more, strategy))
    lab.equal(11.0, strategy.reduce(kd.ReduceOp.SUM, values, axis=0))
    lab.equal([7.0, 8.0], strategy.gather(next(batches), axis=0))


@case
def loops_over_datasets(lab, strategy):
    """A loop reads all batches, or a number of steps per epoch; `input_signature` is refused."""
    features, labels = np.ones((4, 1), "float32"), np.ones((4, 1), "float32")
    dataset = strategy.experimental_distribute_dataset([(features, labels)] * 6)

    @kd.function
    def errors(batch):
        features, labels = batch
        return labels - 0.3 * features

    for batch in dataset:
        loss = lab.components(strategy.run(errors, args=(batch,)), strategy)
        lab.equal([np.full((2, 1), 0.7, "float32")] * 2, loss, FLOAT32)

    @kd.function
    def total(batch):
        losses = strategy.run(lambda _: ops.convert_to_tensor(0.1), args=(batch,))
        return strategy.reduce(kd.ReduceOp.SUM, losses, axis=None)

    for _ in range(2):
        batches = iter(dataset)
        found = sum(float(lab.numpy(total(next(batches)))) for _ in range(3)) / 3
        lab.equal(0.2, np.float32(found), FLOAT32)
    with lab.raises(NotImplementedError, "kerasdist.function without input_signature.*Leave it"):
        kd.function(input_signature=[dataset.element_spec])
    square = kd.function(lambda batch: strategy.run(ops.square, args=(batch[0],)))
    lab.equal(
        [np.ones((2, 1), "float32")] * 2, lab.components(square(next(iter(dataset))), strategy)
    )


@case
def the_last_batches(lab, strategy):
    """`get_next` returns the next batch; at the end of the data, `next` returns its default."""
    rows = np.arange(5, dtype="float32")
    batches = iter(strategy.experimental_distribute_dataset([rows[:2], rows[2:4], rows[4:]]))
    lab.check(isinstance(batches, kd.DistributedIterator), "a DistributedIterator")
    found = [lab.components(strategy.run(lambda x: x + 0, args=(batches.get_next(),)), strategy)]
    while (batch := next(batches, None)) is not None:
        found.append(lab.components(strategy.run(lambda x: x + 0, args=(batch,)), strategy))
    lab.equal([[[0], [1]], [[2], [3]], [[4], []]], found)
    with lab.raises(AttributeError, r"get_next_as_optional.*Write next\(iterator, None\)"):
        batches.get_next_as_optional()


@case
def clusters(lab):
    """Resolvers read `TF_CONFIG` or addresses; arguments without a meaning are refused."""
    workers = {"worker": ["localhost:12345", "localhost:23456"]}
    told = json.dumps({"cluster": workers, "task": {"type": "worker", "index": 0}})
    found = kd.cluster_resolver.TFConfigClusterResolver({"TF_CONFIG": told})
    lab.equal(("worker", 0, 2), (found.task_type, found.task_id, found.num_workers))
    simple = kd.cluster_resolver.SimpleClusterResolver
    second = simple(workers, task_type="worker", task_id=1, rpc_layer="grpc")
    lab.equal((1, "grpc://localhost:23456"), (second.task_id, second.master()))
    with lab.raises(NotImplementedError, "jobs=.*'ps'.*no parameter servers.*Give a cluster of"):
        simple(workers | {"ps": ["localhost:34567"]}, task_type="worker", task_id=1)
    refused = {
        "num_accelerators": lambda: simple(workers, num_accelerators={"GPU": 8}),
        "job_to_label_mapping": lambda: kd.cluster_resolver.KubernetesClusterResolver(
            job_to_label_mapping={"worker": ["job-name=worker"]}
        ),
        "tpu": lambda: kd.cluster_resolver.TPUClusterResolver(tpu="grpc://10.0.0.1:8470"),
        "zone": lambda: kd.cluster_resolver.TPUClusterResolver.connect(zone="us-west1"),
    }
    for name, make in refused.items():
        with lab.raises(NotImplementedError, f"without {name}. Received: {name}=.*eave it out"):
            make()
    for name in ("GCEClusterResolver", "UnionResolver"):
        with lab.raises(AttributeError, f"{name}'. Describe the cluster by .*SimpleCluster"):
            getattr(kd.cluster_resolver, name)


# Of strategies in which a replica has several devices: CPU devices stand in for TPUs.


@case
def logical_devices(lab):
    """A step cuts images over a replica's devices and copies labels to them (`TPUStrategy`).

    CPU devices stand in for TPUs. Backends other than JAX refuse the strategy.
    """
    images = np.random.default_rng(0).normal(size=(4, 4, 4, 1)).astype("float32")
    labels = np.ones((4, 3), "float32")
    options = {
        "experimental_device_assignment": kd.DeviceAssignment.build(2, (1, 1, 1, 2)),
        "experimental_spmd_xla_partitioning": True,
    }
    if lab.backend != "jax":
        with lab.raises(kd.errors.UnsupportedError, "KERAS_BACKEND=jax"):
            kd.TPUStrategy(**options)
        return
    strategy = kd.TPUStrategy(**options)
    with strategy.scope():
        convolved = keras.layers.Conv2D(3, 3, padding="same", activation="tanh")
        layers = [convolved, keras.layers.GlobalAveragePooling2D()]
        model = keras.Sequential([keras.Input((4, 4, 1)), *layers])

    @kd.function
    def step(inputs):
        images, labels = inputs
        images = strategy.experimental_split_to_logical_devices(images, [1, 2, 1, 1])
        output = model(images)
        labels = strategy.experimental_replicate_to_logical_devices(labels)
        output = strategy.experimental_replicate_to_logical_devices(output)
        doubled = strategy.experimental_assign_to_logical_device(labels + labels, 0)
        return ops.mean(ops.square(labels - output)), doubled

    [batch] = strategy.distribute_dataset([(images, labels)])
    losses, doubled = strategy.run(step, args=(batch,))
    loss = strategy.reduce("MEAN", losses, axis=None)
    lab.equal(ops.mean(ops.square(labels - model(images))), loss, FLOAT32)
    lab.equal(2 * labels, strategy.gather(doubled, axis=0))


@case
def the_way_to_a_tpu_strategy(lab):
    """A resolver, a topology and a device assignment lead to a `TPUStrategy` and its step.

    CPU devices stand in for a slice of 2 x 2 chips. Backends other than JAX refuse the strategy.
    """
    resolver = kd.cluster_resolver.TPUClusterResolver(tpu="")
    kd.connect_to_cluster(resolver)
    lab.equal(("worker", 0, 1, ""), (
        resolver.task_type, resolver.task_id, resolver.num_workers, resolver.master()
    ))  # fmt: skip
    with lab.raises(NotImplementedError, "without protocol. Received: .*Leave it out"):
        kd.connect_to_cluster(resolver, protocol="grpc")
    if lab.backend != "jax":
        for make in (kd.tpu.experimental.initialize_tpu_system, kd.TPUStrategy):
            with lab.raises(kd.errors.UnsupportedError, "KERAS_BACKEND=jax"):
                make(resolver)
        return
    topology = kd.tpu.experimental.initialize_tpu_system(resolver)
    count = len(topology.device_coordinates[0])
    lab.equal((1, count, 4), (topology.num_tasks, topology.num_tpus_per_task, topology.mesh_rank))
    assignment = kd.tpu.experimental.DeviceAssignment.build(
        topology, computation_shape=[1, 1, 1, 2], num_replicas=1
    )
    lab.equal([[0, 1]], ordinals(assignment))
    strategy = kd.TPUStrategy(resolver, experimental_device_assignment=assignment)
    lab.equal(1, strategy.num_replicas_in_sync)
    lab.check(strategy.cluster_resolver is resolver, "the resolver")

    def dataset_fn(context):
        lab.equal((0, 1), (context.input_pipeline_id, context.num_input_pipelines))
        return [(np.ones((2, 5), "float32"), np.zeros((2, 1), "int32"))] * 2

    @kd.function
    def step_fn(inputs):
        features, _ = inputs
        return strategy.experimental_assign_to_logical_device(ops.add(features, features), 0)

    iterator = iter(strategy.experimental_distribute_datasets_from_function(dataset_fn))
    found = strategy.run(step_fn, args=(next(iterator),))
    lab.equal(np.full((2, 5), 2.0, "float32"), found)
    single = kd.experimental.TPUStrategy(device_assignment=kd.DeviceAssignment.SINGLE_CORE)
    lab.equal(["cpu:0"], list(single.extended.worker_devices))
    with lab.raises(NotImplementedError, "without steps_per_run.*steps_per_execution"):
        kd.experimental.TPUStrategy(steps_per_run=2)
    with lab.raises(kd.errors.DeviceError, f"Expected {2 * count} devices"):
        large = kd.tpu.Topology.grid(1, 2 * count)
        kd.TPUStrategy(device_assignment=kd.DeviceAssignment.build(large, num_replicas=2 * count))


def ordinals(assignment):
    cores = range(assignment.num_cores_per_replica)
    return [[assignment.tpu_ordinal(r, c) for c in cores] for r in range(assignment.num_replicas)]
