"""What users of `tf.distribute` write with TensorFlow itself: AutoGraph, `tf.Variable`."""

import tempfile
from pathlib import Path

import numpy as np
import pytest

from tests.conformance.lazy import kd, keras, tf
from tests.facade import case as of_suite
from tests.facade.lab import numbered


def case(function):
    return of_suite.case(function, backends=("tensorflow",))


@case
def autograph(lab, strategy):
    """AutoGraph converts branches and loops in a step and in its merge call."""
    numbers = tf.data.Dataset.range(4)

    def merge(given, x):
        total = given.reduce("SUM", x, axis=None)
        if total > 2.0:
            total = total * 10.0
        return total

    def step(x):
        if x > 1.0:
            y = x + 1.0
        else:
            y = x - 1.0
        total = tf.constant(0, tf.int64)
        for number in numbers:
            if tf.math.floormod(number, 2) == 0:
                continue
            total += number
        while y < 10.0:
            y = y * 3.0 + 1.0
        return y, total

    def merging(x):
        return kd.get_replica_context().merge_call(merge, args=(x,)) + x

    value = numbered(strategy, lambda i: tf.constant(float(i + 1)))
    for run in (
        tf.function(lambda x: strategy.run(step, args=(x,))),
        lambda x: strategy.run(tf.function(step), args=(x,)),
    ):
        found, totals = run(value)
        lab.equal([13.0, 10.0], lab.components(found, strategy))
        lab.equal([4, 4], lab.components(totals, strategy))
    merged = tf.function(lambda x: strategy.run(merging, args=(x,)))(value)
    lab.equal([31.0, 32.0], lab.components(merged, strategy))


@case
def slices_are_not_gathered(lab, strategy):
    """`gather` and `all_gather` refuse `tf.IndexedSlices`."""
    slices = tf.IndexedSlices(tf.ones((1, 2)), tf.constant([0]), tf.constant([3, 2]))
    for one in (strategy, kd.OneDeviceStrategy("cpu:0"), kd.get_strategy()):
        with lab.raises(NotImplementedError, "Expected a dense tensor.*Received.*IndexedSlices"):
            one.gather(slices, axis=0)
        with lab.raises(NotImplementedError, "Expected a dense tensor.*Received.*IndexedSlices"):
            one.run(lambda: kd.get_replica_context().all_gather(slices, axis=0))


@case
def pipelines_on_central_storage(lab):
    """`CentralStorageStrategy` distributes `tf.data` datasets and functions that make them."""
    strategy = kd.CentralStorageStrategy(lab.devices)
    numbers = tf.data.Dataset.range(8).batch(4)
    each = kd.InputOptions(experimental_replication_mode="PER_REPLICA")

    def parts(dataset):
        return [[one.tolist() for one in lab.components(batch, strategy)] for batch in dataset]

    for options in (None, kd.InputOptions(), tf.distribute.InputOptions(False)):
        data = strategy.distribute_dataset(numbers, options)
        for _ in range(2):
            lab.equal([[[0, 1], [2, 3]], [[4, 5], [6, 7]]], parts(data))
    lab.equal(2, len(data))
    from_function = strategy.distribute_datasets_from_function
    lab.equal([[[0, 1, 2, 3], [4, 5, 6, 7]]], parts(from_function(lambda _: numbers)))
    lab.equal(
        [[[0, 1, 2, 3]] * 2, [[4, 5, 6, 7]] * 2], parts(from_function(lambda _: numbers, each))
    )
    with strategy.scope():
        model = keras.Sequential([keras.layers.Dense(1, kernel_initializer="ones")])
        model.compile("sgd", "mse")
    rows = tf.data.Dataset.from_tensors((tf.ones((4, 3)), tf.zeros((4, 1))))
    lab.equal([9.0], model.fit(strategy.distribute_dataset(rows), verbose=0).history["loss"])


@case
def variables_of_tensorflow(lab, strategy):
    """A `tf.Variable` is aggregated as declared when replicas assign to it or add to it."""
    given = np.float32([[1.0, 0.0], [1.0, 1.0]])
    x = numbered(strategy, lambda i: tf.constant(given[i]))
    combined = {"SUM": given.sum(0), "MEAN": given.mean(0), "ONLY_FIRST_REPLICA": given[0]}
    start = np.float32([1.0, 2.0])
    for name, by_all in combined.items():
        with strategy.scope():
            mirrored, on_read = (
                tf.Variable(
                    start,
                    synchronization=getattr(tf.VariableSynchronization, how),
                    aggregation=getattr(tf.VariableAggregation, name),
                )
                for how in ("ON_WRITE", "ON_READ")
            )
        for variable in (mirrored, on_read):
            strategy.run(variable.assign, args=(x,))
            add = variable.assign_add
            tf.function(lambda x, add=add: strategy.run(add, args=(x,)))(x)
            lab.check(strategy.extended.variable_created_in_scope(variable), "the strategy's")
        lab.equal([2 * by_all] * 2, lab.components(mirrored, strategy))
        lab.equal([*2 * given], lab.components(on_read, strategy))
        with strategy.scope():
            lab.equal(2 * by_all, tf.identity(on_read))
            mirrored.assign(start)
        lab.equal([start] * 2, lab.components(mirrored, strategy))
    outside = tf.Variable(1.0)
    lab.equal(False, strategy.extended.variable_created_in_scope(outside))


@case
def variables_made_in_run(lab, strategy):
    """A `tf.Variable` that a step makes in its first call is one mirrored variable."""
    made = []

    def step():
        if not made:
            made.append(tf.Variable(tf.ones(2)))
        return made[0] * 2.0

    for run in (strategy.run, tf.function(strategy.run)):
        lab.equal([[2.0, 2.0]] * 2, lab.components(run(step), strategy))
    lab.equal(1, len(made))
    lab.equal([[1.0, 1.0]] * 2, lab.components(made[0], strategy))


@case
def batches_taken_in_a_graph(lab, strategy):
    """A compiled step may call `next` on the iterator of a distributed dataset."""
    x = np.arange(12.0, dtype="float32").reshape(6, 2)
    iterator = iter(strategy.distribute_dataset(tf.data.Dataset.from_tensor_slices(x).batch(4)))
    step = tf.function(lambda: strategy.run(lambda rows: rows * 2.0, args=(next(iterator),)))
    found = [np.concatenate(lab.components(step(), strategy)) for _ in range(2)]
    lab.equal([2 * x[:4], 2 * x[4:]], found)


@case
def errors_in_compiled_functions(lab, strategy):
    """An exception in a compiled step keeps its type, which AutoGraph would change."""

    class Own(Exception):
        def __init__(self, one, other):
            super().__init__(one, other)

    for error in (Own(1, 2), KeyError("key"), IndexError("index"), ValueError("value")):

        def step(error=error):
            if kd.get_replica_context().replica_id_in_sync_group == 1:
                raise error
            kd.get_replica_context().all_reduce("SUM", 1.0)

        with lab.raises(type(error), ""):
            tf.function(lambda step=step: strategy.run(step))()
        lab.still_usable(strategy)


@case
def the_check_leaves_variables_of_tensorflow(lab, strategy):
    """A `tf.Variable` that counts steps does not count those of the first-batch check."""

    class Counting(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(1)
            self.steps = tf.Variable(0, trainable=False)

        def call(self, x):
            return self.dense(x)

        def train_step(self, data):
            self.steps.assign_add(1)
            return super().train_step(data)

    with strategy.scope():
        model = Counting()
        model.compile("sgd", "mse")
    x = np.ones((8, 2), "float32")
    model.fit(x, x[:, :1], batch_size=3, verbose=0)
    lab.equal(3, int(model.steps))


@case
def a_state_for_each_row_is_refused(lab, strategy):
    """A model with a stateful RNN is refused, because replicas get only some of its rows."""
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((3, 1), batch_size=2), keras.layers.LSTM(2, stateful=True)]
        )
    with pytest.raises(kd.errors.UnsupportedError, match="stateful=True"):
        model.predict(np.ones((4, 3, 1), "float32"), batch_size=2, verbose=0)


@case
def a_strategy_of_tensorflow_beside(lab, strategy):
    """Variables of a `tf.distribute` strategy beside kerasdist's behave as TensorFlow's do."""
    with strategy.scope():
        own = tf.Variable(0.0)
        lab.check(not own and float(own) == 0.0, "expected a number")
        with tf.GradientTape() as tape:
            product = own * own
        lab.equal(0.0, tape.gradient(product, own))
    beside = tf.distribute.MirroredStrategy([f"CPU:{index}" for index in range(lab.replicas)])
    with beside.scope():
        theirs = tf.Variable(0.0)
        lab.check(bool(theirs), "expected True, as of any object")
        for convert in (int, float, complex):
            with lab.raises(TypeError, "Expected a number"):
                convert(theirs)
        with lab.raises(ValueError, "__array__ method not producing an array"):
            np.array(theirs)
        with tf.GradientTape() as tape:
            product = theirs * theirs
        with lab.raises(ValueError, "not available outside the replica context"):
            tape.gradient(product, theirs)


@case
def ragged_and_sparse_pipelines(lab, strategy):
    """Ragged and sparse tensors in `tf.data`, in distributed values and in predictions."""
    lengths = np.arange(6) % 4
    rows = tf.RaggedTensor.from_row_lengths(np.arange(lengths.sum(), dtype="float32"), lengths)
    parts = {"ragged": rows, "sparse": rows.to_sparse(), "dense": rows.to_tensor()}
    [batch] = strategy.distribute_dataset(tf.data.Dataset.from_tensor_slices(parts).batch(6))
    whole = rows.to_tensor().numpy()
    for name, dense in (
        ("dense", lambda x: x),
        ("ragged", lambda x: x.to_tensor(shape=(None, 3))),
        ("sparse", tf.sparse.to_dense),
    ):
        found = strategy.experimental_local_results(strategy.run(dense, args=(batch[name],)))
        lab.equal(whole, np.concatenate([one.numpy() for one in found]))
    value = strategy.distribute_values_from_function(lambda _: rows.to_sparse())
    lab.equal([21.0] * 2, lab.components(
        strategy.run(lambda x: tf.reduce_sum(x.values), args=(value,)), strategy
    ))  # fmt: skip

    class Ragged(keras.layers.Layer):
        def call(self, x):
            return tf.RaggedTensor.from_tensor(x, padding=0)

        def compute_output_spec(self, x):
            return keras.KerasTensor((None, None), x.dtype, ragged=True)

    with strategy.scope():
        model = keras.Sequential([Ragged()])
    x = np.float32([[1, 0, 0], [2, 3, 0], [0, 0, 4], [0, 0, 0]])
    found = model.predict(x, batch_size=4, verbose=0)
    lab.equal([[1], [2, 3], [0, 0, 4], []], found.to_list())


@case
def generators_of_tensorflow(lab, strategy):
    """A `tf.random.Generator` draws other numbers in each replica."""
    outside = tf.random.Generator.from_seed(1)
    with strategy.scope():
        inside = tf.random.Generator.from_seed(1)
    for generator in (outside, inside):
        step = lambda generator=generator: generator.uniform_full_int((4,), dtype=tf.int32)  # noqa: E731
        found = [lab.components(strategy.run(step), strategy) for _ in range(2)]
        lab.equal(16, len({int(one) for parts in found for part in parts for one in part}))
    with strategy.scope():
        inside.normal(())
    first, second = lab.components(inside.state, strategy)
    lab.equal(first, second)


@case
def checkpoints_and_summaries(lab, strategy):
    """`tf.train.Checkpoint` restores each copy; only replica 0 writes a `tf.summary`."""
    with strategy.scope():
        layer = keras.layers.Dense(1)
        layer.build((None, 2))
        total = keras.Variable(3.0, synchronization="on_read", aggregation="sum", trainable=False)
    three = lab.strategy(3)
    with three.scope():
        other = keras.layers.Dense(1)
        other.build((None, 2))
    kernel = lab.numpy(layer.kernel)
    with tempfile.TemporaryDirectory() as folder:
        kept = tf.train.Checkpoint(layer=layer, total=total)
        path = kept.save(f"{folder}/kept")
        layer.kernel.assign(kernel * 0.0)
        total.assign(0.0)
        kept.restore(path)
        lab.equal([kernel] * 2, lab.components(layer.kernel, strategy))
        lab.equal(6.0, total)  # of which each replica held 3.0
        tf.train.Checkpoint(layer=other).restore(path).expect_partial()
        lab.equal([kernel] * 3, lab.components(other.kernel, three))

    with tempfile.TemporaryDirectory() as folder:
        writer = tf.summary.create_file_writer(folder)

        def step():
            here = kd.get_replica_context().replica_id_in_sync_group
            with writer.as_default(step=1):
                tf.summary.scalar("number", tf.cast(here, "float32"))

        strategy.run(step)
        writer.close()
        [path] = Path(folder).iterdir()
        # The file's version is its first record.
        lab.equal(2, len(list(tf.data.TFRecordDataset(str(path)))))


@case
def scattered_into_variables(lab, strategy):
    """`scatter_*` in replicas follows the variable's aggregation, or is TensorFlow's error."""
    how = tf.VariableAggregation
    with strategy.scope():
        mean, total, first = (
            tf.Variable([0.0, 2.0, 0.0], aggregation=one)
            for one in (how.MEAN, how.SUM, how.ONLY_FIRST_REPLICA)
        )
    one = tf.IndexedSlices(tf.constant([1.0]), tf.constant([1]), (3,))

    def subtract(row):
        row = tf.reshape(row, (1,))
        return mean.scatter_sub(tf.IndexedSlices(tf.constant([2.0]), row, (3,)))

    rows = numbered(strategy, tf.constant)
    found = tf.function(lambda: strategy.run(subtract, args=(rows,)))()
    lab.equal([[-1.0, 1.0, 0.0]] * 2, lab.components(found, strategy))
    with lab.raises(NotImplementedError, "scatter_min"):
        strategy.run(lambda: total.scatter_min(one))
    strategy.run(lambda: first.scatter_min(one))
    lab.equal([[0.0, 1.0, 0.0]] * 2, lab.components(first, strategy))
    with strategy.scope():
        total.scatter_add(one)
    lab.equal([[0.0, 3.0, 0.0]] * 2, lab.components(total, strategy))


@case
def traced_once_for_all_iterators(lab, strategy):
    """A function that takes an iterator, or batches of an `element_spec`, is traced once."""
    x = np.arange(10.0, dtype="float32")
    data = strategy.distribute_dataset(tf.data.Dataset.from_tensor_slices((x, x)).batch(4))
    add = lambda x, y: tf.reduce_sum(x + y)  # noqa: E731

    @tf.function
    def taking(iterator):
        return strategy.reduce("SUM", strategy.run(add, args=next(iterator)), axis=None)

    @tf.function(input_signature=[data.element_spec])
    def given(batch):
        return strategy.reduce("SUM", strategy.run(add, args=batch), axis=None)

    for _ in range(2):
        lab.equal(12.0, taking(iter(data)))
    lab.equal([12.0, 44.0, 34.0], [float(given(batch)) for batch in data])
    lab.equal([1, 1], [one.experimental_get_tracing_count() for one in (taking, given)])


@case
def modules_of_tensorflow(lab, strategy):
    """`run` takes a `tf.Module` with a layer for XLA, and a function of a SavedModel."""

    class Compiled(keras.layers.Layer):
        def build(self, shape):
            self.kernel = self.add_weight(shape=(shape[-1], 1), initializer="ones")

        @tf.function(jit_compile=True)
        def call(self, x):
            return tf.matmul(x, self.kernel)

    class Module(tf.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.offset = Compiled(), tf.Variable(1.0)

        def __call__(self, x):
            return self.layer(x) + self.offset

        @tf.function(input_signature=[tf.TensorSpec((None, 3))])
        def serve(self, x):
            return tf.reduce_sum(x, 1) + self.offset

    with strategy.scope():
        module = Module()
    lab.equal(2, len(strategy.experimental_local_results(module.offset)))

    def step(x):
        with tf.GradientTape() as tape:
            total = tf.reduce_sum(module(x))
        return total, tape.gradient(total, module.offset)

    x = numbered(strategy, lambda i: np.full((1, 3), i + 1, "float32"))
    totals, gradients = tf.function(lambda: strategy.run(step, args=(x,)))()
    lab.equal([4.0, 7.0], lab.components(totals, strategy))
    lab.equal([1.0, 1.0], lab.components(gradients, strategy))
    with tempfile.TemporaryDirectory() as folder:
        tf.saved_model.save(module, folder, signatures=module.serve)
        loaded = tf.saved_model.load(folder)
        found = strategy.run(loaded.signatures["serving_default"], args=(x,))["output_0"]
    lab.equal([[4.0], [7.0]], lab.components(found, strategy))
