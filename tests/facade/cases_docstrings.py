"""The examples of tf.distribute's docstrings that no other case holds (`coverage.COVERED_BY`)."""

import collections

import numpy as np

from tests.conformance.lazy import kd, keras, ops
from tests.facade.case import case
from tests.facade.lab import FLOAT32


@case
def central_storage(lab):
    """Variables on one device: a function over batches of which the last is smaller; reductions."""
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
    """Outside of scopes, in a scope and in `run`: the strategy in force, and whose code it is."""

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
    """Variables beside another, updated with them."""
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
    """`run` in a compiled function, of values that are made there; an all-reduce in it."""

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
    """Components are on their replicas' devices, what they are reduced to is one tensor."""
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
    """Options of a run: kerasdist's and tf.distribute's own; anything else is refused."""
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


# Of strategies in which a replica has several devices: CPU devices stand in for TPUs.


@case
def logical_devices(lab):
    """Images cut, logits and labels whole on every logical device for the loss; one adds.

    CPU devices stand in for TPUs. Where replicas have one device each, an error says so.
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
