"""The examples of tf.distribute's docstrings: a case each, named after where the example stands.

What other cases hold as well is in `coverage.COVERED_BY`.
"""

import collections

import numpy as np

from tests.facade.case import case
from tests.facade.lab import FLOAT32
from tests.facade.lazy import kd, keras, ops


@case
def central_storage_strategy__CentralStorageStrategy__1(lab):
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
def distribute_lib__get_strategy__1(lab):
    """Outside of scopes, in a scope and in `run`: the strategy in force, and whose code it is."""
    strategy = lab.strategy()

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
def distribute_lib__StrategyExtendedV2_colocate_vars_with__1(lab):
    """Variables beside another, updated with them."""
    strategy = lab.strategy()
    with strategy.scope():
        first = keras.Variable(1.0)
        with strategy.extended.colocate_vars_with(first):
            second, third = keras.Variable(2.0), keras.Variable(3.0)
        strategy.extended.update(
            first, lambda v1, v2, v3: v1.assign(v2 * 10.0 + v3), args=(second, third)
        )
    lab.equal([23.0, 23.0], lab.components(first, strategy))


@case
def distribute_lib__StrategyExtendedV1_call_for_each_replica__1(lab):
    """A merge call sums over the replicas, whose own results differ."""
    strategy = lab.strategy()

    def merge(strategy, value):
        return sum(strategy.experimental_local_results(value))

    def step(three):
        here = kd.get_replica_context()
        v = three + here.replica_id_in_sync_group
        return here.merge_call(merge, args=(v,)) + v

    with strategy.scope():
        for run in (strategy.run, strategy.extended.call_for_each_replica):
            lab.equal([10, 11], lab.components(run(step, args=[3]), strategy))


@case
def distribute_lib__StrategyBase_run__2(lab):
    """`run` in a compiled function, of values that are made there; an all-reduce in it."""
    strategy = lab.strategy()

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
def distribute_lib__StrategyBase_reduce__2(lab):
    """Components are on their replicas' devices, what they are reduced to is one tensor."""
    strategy = lab.strategy()
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
def tpu_strategy__TPUStrategyV1_run__2(lab):
    """Options of a run: kerasdist's and tf.distribute's own; anything else is refused."""
    strategy = lab.strategy()
    tf_options = collections.namedtuple("RunOptions", ["dynamic", "bucketizing", "xla"])
    step = kd.function(ops.sum)
    lab.equal(3.0, step(ops.convert_to_tensor([1.0, 2.0])))
    [batch] = strategy.experimental_distribute_dataset([np.arange(2, dtype="float32")])

    def run(options):
        return lab.components(strategy.run(step, args=(batch,), options=options), strategy)

    bucketizing = kd.RunOptions(experimental_bucketizing_dynamic_shape=True)
    for options in (None, kd.RunOptions(), bucketizing, tf_options(True, True, None)):
        lab.equal([0.0, 1.0], run(options))
    with lab.raises(TypeError, r"Expected kerasdist.RunOptions or None. Received: options=\(1,\)"):
        run((1,))
    with lab.raises(kd.errors.UnsupportedError, "experimental_xla_options='o'.*XLA_FLAGS"):
        run(kd.RunOptions(experimental_xla_options="o"))


# Of strategies in which a replica has several devices: CPU devices stand in for TPUs.


def cores(lab, replicas, shape, **options):
    """A strategy, where the backend has one; elsewhere None, after its clear error."""
    assignment = kd.DeviceAssignment.build(replicas, shape)
    if lab.backend == "jax":
        return kd.TPUStrategy(experimental_device_assignment=assignment, **options)
    with lab.raises(kd.errors.UnsupportedError, "KERAS_BACKEND=jax"):
        kd.TPUStrategy(experimental_device_assignment=assignment, **options)
    return None


@case
def tpu_strategy__TPUStrategyV2_experimental_assign_to_logical_device__1(lab):
    """An addition that one of two logical devices is asked for, on one replica and on two."""
    x = np.arange(8, dtype="float32").reshape(2, 4)
    for replicas in (1, 2):
        strategy = cores(lab, replicas, (1, 1, 1, 2))
        if strategy is None:
            continue
        [batch, *_] = strategy.distribute_datasets_from_function(lambda _: [x] * 4)

        @kd.function
        def step(inputs, strategy=strategy):
            return strategy.experimental_assign_to_logical_device(inputs + inputs, 0)

        results = strategy.experimental_local_results(strategy.run(step, args=(batch,)))
        lab.equal([2 * x] * replicas, list(results))


def image_model(strategy):
    with strategy.scope():
        convolved = keras.layers.Conv2D(3, 3, padding="same", activation="tanh")
        layers = [convolved, keras.layers.GlobalAveragePooling2D()]
        return keras.Sequential([keras.Input((4, 4, 1)), *layers])


@case
def tpu_strategy__TPUStrategyV2_experimental_replicate_to_logical_devices__1(lab):
    """Images cut, logits and labels whole on every logical device for the loss."""
    images = np.random.default_rng(0).normal(size=(4, 4, 4, 1)).astype("float32")
    labels = np.ones((4, 3), "float32")
    strategy = cores(lab, 2, (1, 1, 1, 2), experimental_spmd_xla_partitioning=True)
    if strategy is None:
        return
    model = image_model(strategy)

    @kd.function
    def step(inputs):
        images, labels = inputs
        images = strategy.experimental_split_to_logical_devices(images, [1, 2, 1, 1])
        output = model(images)
        labels = strategy.experimental_replicate_to_logical_devices(labels)
        output = strategy.experimental_replicate_to_logical_devices(output)
        return ops.mean(ops.square(labels - output))

    [batch] = strategy.distribute_dataset([(images, labels)])
    loss = strategy.reduce("MEAN", strategy.run(step, args=(batch,)), axis=None)
    lab.equal(ops.mean(ops.square(labels - model(images))), loss, FLOAT32)
