"""Distributed datasets and values."""

import numpy as np

from tests.conformance.lazy import kd, keras, ops, tf
from tests.facade.behaviours import behaviour
from tests.facade.lab import numbered, variable_of

ROWS = np.arange(10, dtype="float32")
BATCHES = [ROWS[:4], ROWS[4:8], ROWS[8:]]


def parts(lab, s, dataset):
    return [[one.tolist() for one in lab.components(batch, s)] for batch in dataset]


@behaviour("A global batch is divided: each replica gets consecutive rows")
def _(lab, s):
    expected = [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8], [9]]]
    lab.equal(expected, parts(lab, s, s.distribute_dataset(BATCHES)))


SPREAD = (
    "`tf.distribute` fills the first replicas first. kerasdist spreads the rows evenly, except the "
    "rows of a `tf.data.Dataset` on TensorFlow."
)


@behaviour(
    "A batch that cannot be divided evenly over the replicas",
    tensorflow=SPREAD,
    jax=SPREAD,
    torch=SPREAD,
)
def _(lab, s):
    lab.equal([[[0, 1, 2], [3, 4]]], parts(lab, s, s.distribute_dataset([ROWS[:5]])))


@behaviour("If a batch has fewer rows than replicas, the last replicas get no rows")
def _(lab, s):
    lab.equal([[[0], []]], parts(lab, s, s.distribute_dataset([ROWS[:1]])))


@behaviour(
    "A distributed dataset can be iterated several times, by two iterators at once, and only in "
    "part"
)
def _(lab, s):
    data = s.distribute_dataset(BATCHES)
    whole = parts(lab, s, data)
    first, second = iter(data), iter(data)
    for _ in range(2):
        next(first)
    lab.equal(whole[0], parts(lab, s, [next(second)])[0])
    lab.equal(whole, parts(lab, s, data))


@behaviour("At the end of the data `next` raises StopIteration, or returns its default")
def _(lab, s):
    iterator = iter(s.distribute_dataset(BATCHES[:1]))
    next(iterator)
    lab.check(next(iterator, None) is None, "the default")
    with lab.raises(StopIteration, ""):
        next(iterator)


@behaviour(
    "`len` of a distributed dataset is the number of batches, if the length of its source is known"
)
def _(lab, s):
    lab.equal(3, len(s.distribute_dataset(BATCHES)))


@behaviour("An empty dataset has no batch")
def _(lab, s):
    lab.equal([], parts(lab, s, s.distribute_dataset([])))


@behaviour("Elements may be tuples and dicts, and each replica gets the same structure")
def _(lab, s):
    [batch] = s.distribute_dataset([{"x": ROWS[:4], "y": (ROWS[4:8],)}])
    lab.equal([[0, 1], [2, 3]], lab.components(batch["x"], s))
    lab.equal([[4, 5], [6, 7]], lab.components(batch["y"][0], s))


@behaviour("A generator can be distributed, and is read only once")
def _(lab, s):
    lab.equal([[[0, 1], [2, 3]]], parts(lab, s, s.distribute_dataset(x for x in BATCHES[:1])))


@behaviour(
    "A dataset function is told the number of its pipeline, how many pipelines there are, and how "
    "many replicas"
)
def _(lab, s):
    seen = []

    def make(context):
        seen.append((
            context.input_pipeline_id, context.num_input_pipelines, context.num_replicas_in_sync,
            context.get_per_replica_batch_size(8),
        ))  # fmt: skip
        return BATCHES

    s.distribute_datasets_from_function(make)
    lab.equal([(0, 1, 2, 4)], seen)


@behaviour(
    "`get_per_replica_batch_size` raises a ValueError if the number of replicas does not divide "
    "the batch size"
)
def _(lab, s):
    def make(context):
        context.get_per_replica_batch_size(7)
        return BATCHES

    with lab.raises(ValueError, "multiple"):
        s.distribute_datasets_from_function(make)


@behaviour("With a dataset function, each replica takes the next batch of the pipeline")
def _(lab, s):
    data = s.distribute_datasets_from_function(lambda _: BATCHES[:2])
    lab.equal([[[0, 1, 2, 3], [4, 5, 6, 7]]], parts(lab, s, data))


@behaviour("With `PER_REPLICA`, a dataset function makes a pipeline for each replica")
def _(lab, s):
    options = kd.InputOptions(experimental_replication_mode="PER_REPLICA")
    make = lambda context: [ROWS[:2] + 10 * context.input_pipeline_id]  # noqa: E731
    data = s.distribute_datasets_from_function(make, options)
    lab.equal([[[0, 1], [10, 11]]], parts(lab, s, data))


@behaviour(
    "`experimental_per_replica_buffer_size` and `experimental_fetch_to_device` do not change the "
    "batches"
)
def _(lab, s):
    whole = [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8], [9]]]
    for size in (0, 1, 4):
        for fetch in (None, True, False):
            options = kd.InputOptions(fetch, experimental_per_replica_buffer_size=size)
            lab.equal(whole, parts(lab, s, s.distribute_dataset(BATCHES, options)))


@behaviour(
    "`experimental_place_dataset_on_device` works with `PER_REPLICA` and a function that returns "
    "`tf.data`",
    jax="kerasdist refuses this option, because it puts each batch on the device of its replica.",
    torch="kerasdist refuses this option, because it puts each batch on the device of its replica.",
)
def _(lab, s):
    options = kd.InputOptions(False, "PER_REPLICA", True)
    if lab.backend == "tensorflow":
        make = lambda _: tf.data.Dataset.from_tensor_slices(ROWS[:4]).batch(2)  # noqa: E731
        found = parts(lab, s, s.distribute_datasets_from_function(make, options))
        lab.equal([[[0, 1]] * 2, [[2, 3]] * 2], found)
    with lab.raises(NotImplementedError, "Expected a tf.data.Dataset on Ten.*Leave the option out"):
        s.distribute_datasets_from_function(lambda _: BATCHES, options)


@behaviour("`distribute_dataset` with `PER_REPLICA`, and a negative buffer size, raise errors")
def _(lab, s):
    options = kd.InputOptions(experimental_replication_mode="PER_REPLICA")
    with lab.raises(NotImplementedError, "PER_WORKER"):
        s.distribute_dataset(BATCHES, options)
    with lab.raises(ValueError, "0 or more"):
        kd.InputOptions(experimental_per_replica_buffer_size=-1)


@behaviour("A compiled step takes batches of different sizes one after another")
def _(lab, s):
    step = kd.function(lambda batch: s.run(ops.sum, args=(batch,)))
    totals = [s.reduce("SUM", step(one), axis=None) for one in s.distribute_dataset(BATCHES)]
    lab.equal([6.0, 22.0, 17.0], [float(lab.numpy(one)) for one in totals])


@behaviour(
    "`distribute_values_from_function` makes a value for each replica, of arrays or other objects"
)
def _(lab, s):
    lab.equal([0, 1], lab.components(numbered(s, np.int32), s))
    found = s.distribute_values_from_function(
        lambda context: {"n": np.int32(context.num_replicas_in_sync), "text": "abc"}
    )
    lab.equal([2, 2], lab.components(found["n"], s))


@behaviour(
    "Distributed values are instances of `PerReplica` and `DistributedValues`; tensors are not"
)
def _(lab, s):
    value = numbered(s, np.float32)
    lab.check(isinstance(value, kd.PerReplica), "a PerReplica")
    lab.check(isinstance(value, kd.DistributedValues), "a DistributedValues")
    lab.check(not isinstance(ops.ones(()), kd.DistributedValues), "a tensor is none")


@behaviour(
    "`experimental_make_numpy_dataset` returns a dataset of single rows, which `batch` groups"
)
def _(lab, s):
    data = s.experimental_make_numpy_dataset((ROWS[:4], ROWS[:4] * 2)).batch(4)
    [(x, y)] = s.distribute_dataset(data)
    lab.equal([[0, 1], [2, 3]], lab.components(x, s))
    lab.equal([[0, 2], [4, 6]], lab.components(y, s))


@behaviour("`distribute_dataset` in a replica raises a RuntimeError")
def _(lab, s):
    with lab.raises(RuntimeError, "distribute_dataset in cross-replica"):
        s.run(lambda: s.distribute_dataset(BATCHES))


@behaviour(
    "`distribute_dataset` refuses an array, because each of its rows would be read as a batch"
)
def _(lab, s):
    with lab.raises((ValueError, TypeError), "Expected"):
        s.distribute_dataset(ROWS)


@behaviour("If a replica has no rows, its step may still return results with and without rows")
def _(lab, s):
    [batch] = s.distribute_dataset([np.float32([5.0])])
    step = lambda x: (ops.zeros((2,)), ops.square(x), ops.size(x))  # noqa: E731
    found = kd.function(lambda x: s.run(step, args=(x,)))(batch)
    lab.equal([[0.0, 0.0]] * 2, lab.components(found[0], s))
    lab.equal([[25.0], []], [one.tolist() for one in lab.components(found[1], s)])
    lab.equal([1, 0], [int(one) for one in lab.components(found[2], s)])


NO_ROWS = "Under `tf.distribute` this fails with an IndexError."


@behaviour(
    "Scalars in the elements of a dataset go to every replica, also with `tf.data`",
    tensorflow=NO_ROWS,
    jax=NO_ROWS,
    torch=NO_ROWS,
)
def _(lab, s):
    numbers, pairs = [np.int64(0), np.int64(1)], [(ROWS[:4], np.float32(7.0))]
    if lab.backend == "tensorflow":
        numbers = tf.data.Dataset.range(2)
        pairs = tf.data.Dataset.from_tensors(pairs[0])
    lab.equal([[0, 0], [1, 1]], parts(lab, s, s.distribute_dataset(numbers)))
    [(x, number)] = s.distribute_dataset(pairs)
    lab.equal([[0, 1], [2, 3]], lab.components(x, s))
    lab.equal([7.0, 7.0], lab.components(number, s))


@behaviour("If a dataset function returns scalars, each replica takes the next scalar")
def _(lab, s):
    make = lambda _: [np.float32(number) for number in range(4)]  # noqa: E731
    lab.equal([[0, 1], [2, 3]], parts(lab, s, s.distribute_datasets_from_function(make)))


@behaviour(
    "With a dataset function, the batches of the replicas in one step may have different shapes"
)
def _(lab, s):
    make = lambda _: [np.float32([[1, 2]] * 2), np.float32([[1, 2, 3]] * 2)]  # noqa: E731
    [batch] = s.distribute_datasets_from_function(make)
    for run in (s.run, kd.function(s.run)):
        lab.equal([1.5, 2.0], lab.components(run(ops.mean, args=(batch,)), s))


ONE_PROGRAM = (
    "kerasdist refuses this: JAX traces a function only once, so all calls of the compiled loop "
    "would get the same batch."
)


@behaviour("A compiled function calls `next` of an iterator in its loop", jax=ONE_PROGRAM)
def _(lab, s):
    total = variable_of(s, 0.0, aggregation="sum")
    batches = tf.data.Dataset.from_tensor_slices(ROWS[:8]).batch(4)
    iterator = iter(s.distribute_dataset(batches if lab.backend == "tensorflow" else BATCHES[:2]))

    def add(x):
        total.assign_add(ops.sum(x))

    def loop():
        for _ in range(2):
            s.run(add, args=(next(iterator),))

    if lab.backend == "jax":
        with lab.raises(NotImplementedError, "batches to be taken outside.*step.next.iterator"):
            kd.function(loop)()
    else:
        kd.function(loop)()
        lab.equal([34.0, 34.0], lab.components(total, s))  # 1 + 5, and then 6 + 9 and 6 + 13


@behaviour(
    "An argument of `run` may be a different object for each replica, such as a seed generator",
    jax=(
        "kerasdist refuses different objects: on JAX all replicas run one program, which has the"
        " same object for all."
    ),
)
def _(lab, s):
    own = [keras.random.SeedGenerator(seed) for seed in (1, 2)]
    value = s.distribute_values_from_function(lambda c: own[c.replica_id_in_sync_group])
    draw = lambda generator: keras.random.uniform((2,), seed=generator)  # noqa: E731
    if lab.backend == "jax":
        with lab.raises(NotImplementedError, "the replicas run one program.*SeedGenerator"):
            s.run(draw, args=(value,))
        return
    expected = [lab.numpy(draw(keras.random.SeedGenerator(seed))) for seed in (1, 2)]
    found = lab.components(s.run(draw, args=(value,)), s)
    lab.check(not np.array_equal(found[0], found[1]), f"{expected} {found}")
