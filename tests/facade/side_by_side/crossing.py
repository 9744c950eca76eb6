"""What crosses over: reductions, variables, datasets."""

import keras
import numpy as np
import tensorflow as tf

from tests.facade.side_by_side.harness import case, error_of, per_replica, plain


@case
def reduce(d, strategy):
    alike = per_replica(strategy, lambda i: tf.reshape(tf.range(6.0) + i, (2, 3)))
    ragged = per_replica(strategy, lambda i: tf.reshape(tf.range(3.0 * (i + 1)), (i + 1, 3)))
    whole = per_replica(strategy, lambda i: tf.constant([i, 5]))
    calls = [(alike, axis) for axis in (None, 0, 1, -1, (0, 1))]
    calls += [(ragged, 0), (ragged, (0, 1)), (ragged, -2), (whole, None), (whole, 0)]
    results = [strategy.reduce(op, x, axis=axis) for op in ("SUM", "MEAN") for x, axis in calls]
    compiled = [
        tf.function(lambda x, op=op, axis=axis: strategy.reduce(op, x, axis=axis))(x)
        for op in ("SUM", "MEAN")
        for x, axis in calls
    ]
    return [results, compiled, strategy.reduce(tf.distribute.ReduceOp.SUM, alike, None)]


@case
def reduce_slices(d, strategy):
    slices = strategy.run(
        lambda: tf.IndexedSlices(
            tf.ones((2, 3)),
            tf.stack([d.get_replica_context().replica_id_in_sync_group, 4]),
            dense_shape=tf.constant([5, 3]),
        )
    )
    return [strategy.reduce(op, slices, axis=None) for op in ("SUM", "MEAN")]


@case
def gather(d, strategy):
    ragged = per_replica(strategy, lambda i: tf.reshape(tf.range(3 * (i + 1)), (1, i + 1, 3)))
    alike = per_replica(strategy, lambda i: tf.constant([[i, 5]]))
    return [
        strategy.gather(ragged, axis=1),
        tf.function(lambda x: strategy.gather(x, axis=1))(ragged),
        [strategy.gather(alike, axis=axis) for axis in (0, 1)],
    ]


@case
def reduce_to(d, strategy):
    x = per_replica(strategy, lambda i: tf.fill((2,), float(i)))
    y = per_replica(strategy, tf.constant)
    with strategy.scope():
        variable = tf.Variable([0.0, 0.0])
        pairs = [(x, variable), (x, variable)]
        return [
            strategy.extended.reduce_to("SUM", x, variable),
            strategy.extended.reduce_to("MEAN", x, x),
            strategy.extended.reduce_to("SUM", y, y),
            strategy.extended.batch_reduce_to("MEAN", pairs),
            strategy.extended.broadcast_to(tf.constant(3.0), variable),
        ]


AGGREGATIONS = (
    tf.VariableAggregation.NONE,
    tf.VariableAggregation.SUM,
    tf.VariableAggregation.MEAN,
    tf.VariableAggregation.ONLY_FIRST_REPLICA,
)
SYNCHRONIZATIONS = (tf.VariableSynchronization.ON_WRITE, tf.VariableSynchronization.ON_READ)


def read_everywhere(d, strategy, variable):
    """A variable as cross-replica, replica and default code see it, and its components."""
    seen = [strategy.experimental_local_results(variable)]
    with strategy.scope():
        seen.append(error_of(lambda: tf.identity(variable)))
        if seen[-1] == "no error":
            seen += [tf.identity(variable), strategy.extended.read_var(variable)]
    seen.append(strategy.run(lambda: tf.identity(variable)))
    return plain(seen)


@case
def variables_of_tensorflow(d, strategy):
    results = []
    for synchronization in SYNCHRONIZATIONS:
        for aggregation in AGGREGATIONS:
            with strategy.scope():
                variable = tf.Variable(
                    [1.0, 2.0], synchronization=synchronization, aggregation=aggregation
                )
            x = per_replica(strategy, lambda i: tf.constant([1.0, float(i)]))
            for method in (variable.assign, variable.assign_add, variable.assign_sub):
                strategy.run(lambda x, method=method: method(x), args=(x,))
                results.append(read_everywhere(d, strategy, variable))
                tf.function(lambda x, method=method: strategy.run(method, args=(x,)))(x)
                results.append(read_everywhere(d, strategy, variable))
            with strategy.scope():
                results.append(error_of(lambda v=variable: v.assign([5.0, 6.0])))
            results.append(read_everywhere(d, strategy, variable))
            results.append(type(variable).__name__)
            results.append(strategy.extended.variable_created_in_scope(variable))
    return results


@case
def variables_of_keras(d, strategy):
    results = []
    for synchronization in ("auto", "on_read"):
        for aggregation in ("none", "sum", "mean", "only_first_replica"):
            with strategy.scope():
                variable = keras.Variable(
                    [1.0, 2.0], synchronization=synchronization, aggregation=aggregation
                )
            x = per_replica(strategy, lambda i: tf.constant([1.0, float(i)]))
            for name in ("assign", "assign_add", "assign_sub"):

                def step(x, variable=variable, name=name):
                    getattr(variable, name)(x)

                strategy.run(step, args=(x,))
                results.append(read_everywhere(d, strategy, variable.value))
                tf.function(lambda x, step=step: strategy.run(step, args=(x,)))(x)
                results.append(read_everywhere(d, strategy, variable.value))
            with strategy.scope():
                results.append(error_of(lambda v=variable: v.assign([5.0, 6.0])))
            results.append(read_everywhere(d, strategy, variable.value))
    return results


@case
def update(d, strategy):
    with strategy.scope():
        variable = tf.Variable(1.0)
    x = per_replica(strategy, lambda i: tf.constant(float(i)))
    with strategy.scope():
        strategy.extended.update(variable, lambda v, x: v.assign_add(x), args=(x,))
        first = read_everywhere(d, strategy, variable)
        strategy.extended.update(
            variable, lambda v, x, y: v.assign(x * y), args=(2.0,), kwargs={"y": 3.0}, group=False
        )
    return [first, read_everywhere(d, strategy, variable)]


@case
def variables_made_in_run(d, strategy):
    made = []

    def step():
        if not made:
            made.append(tf.Variable(tf.ones(2), name="late"))
        return made[0] * 2.0

    def compiled():
        return strategy.run(step)

    result = strategy.run(step)
    compiled = tf.function(compiled)
    return [result, compiled(), type(made[0]).__name__]


@case
def strangers(d, strategy):
    outside = tf.Variable(1.0)
    with strategy.scope():
        with strategy.extended.colocate_vars_with(tf.Variable(1.0)):
            near = tf.Variable(2.0)
        refused = error_of(lambda: strategy.extended.colocate_vars_with(outside).__enter__())
    created = strategy.extended.variable_created_in_scope
    return [created(outside), created(near), refused]


@case
def datasets(d, strategy):
    def batches():
        x = np.arange(26.0, dtype="float32").reshape(13, 2)
        return tf.data.Dataset.from_tensor_slices((x, {"y": np.arange(13)})).batch(5)

    distributed = strategy.experimental_distribute_dataset(batches())
    results = [list(distributed), list(distributed), distributed.element_spec == 0]

    @tf.function
    def loop(dataset):
        total = 0.0
        for x, _ in dataset:
            sums = strategy.run(tf.reduce_sum, args=(x,))
            total += strategy.reduce("SUM", sums, axis=None)
        return total

    iterator = iter(distributed)
    step = tf.function(lambda: strategy.run(lambda batch: batch[0] * 2.0, args=(next(iterator),)))
    return [results, loop(distributed), step(), step()]


@case
def datasets_from_functions(d, strategy):
    def made(here):
        seen.append((here.num_input_pipelines, here.input_pipeline_id, here.num_replicas_in_sync))
        size = here.get_per_replica_batch_size(6)
        return (
            tf.data.Dataset.range(12)
            .shard(here.num_input_pipelines, here.input_pipeline_id)
            .batch(size)
        )

    seen, results = [], []
    for mode in ("PER_WORKER", "PER_REPLICA"):
        options = d.InputOptions(
            experimental_replication_mode=getattr(d.InputReplicationMode, mode),
            experimental_fetch_to_device=mode == "PER_WORKER",
        )
        dataset = strategy.distribute_datasets_from_function(made, options)
        results.append([list(dataset), seen.copy()])
    options = d.InputOptions(experimental_replication_mode=d.InputReplicationMode.PER_REPLICA)
    plain_dataset = tf.data.Dataset.range(4).batch(2)
    results.append(
        error_of(lambda: strategy.experimental_distribute_dataset(plain_dataset, options))
    )
    return results
