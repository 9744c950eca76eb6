"""Distributed datasets: sources, options, iteration."""

import collections

import numpy as np

from tests.conformance.lazy import kd, keras, ops, torch
from tests.facade.case import case
from tests.facade.sources import SIZE, SOURCES, X, Y, pairs, tf_dataset


def pieces(lab, batch, strategy):
    return [lab.components(part, strategy) for part in batch]


def expected_pieces(replicas):
    return [[np.array_split(part, replicas) for part in batch] for batch in pairs()]


def iterating(name):
    def check(lab):
        strategy = lab.strategy()
        make, length = SOURCES[name]
        data = strategy.experimental_distribute_dataset(make())
        # Its own engine divides it: a last piece may be smaller.
        native = name == "tf_data" and lab.backend == "tensorflow"
        for _ in range(2):
            found = [pieces(lab, batch, strategy) for batch in data]
            if native:
                lab.equal(pairs(), [[np.concatenate(part) for part in batch] for batch in found])
            else:
                lab.equal(expected_pieces(lab.replicas), found)
        lab.check(isinstance(data, kd.DistributedDataset), "a DistributedDataset")
        lab.check(data, "true, however long")
        if length is None:
            with lab.raises(TypeError, ""):
                len(data)
        else:
            lab.equal(length, len(data))

    return check


for _name in SOURCES:
    case(
        replicas=(2, 3),
        name=f"from_{_name}",
        title=f"The source `{_name}`, distributed: divided batches in each iteration, and `len`",
    )(iterating(_name))


@case(replicas=(2, 3))
def batches_of_any_form(lab, strategy):
    """Batches may be arrays, dicts, nests with None and numbers, and come from a generator."""
    parts = lambda rows: np.array_split(rows, lab.replicas)  # noqa: E731
    [batch] = strategy.distribute_dataset([{"x": X[:4], "more": [Y[:4], None, 7.0]}])
    lab.equal(parts(X[:4]), lab.components(batch["x"], strategy))
    lab.equal(parts(Y[:4]), lab.components(batch["more"][0], strategy))
    lab.check(batch["more"][1] is None, "None goes to all")
    result = strategy.run(lambda b: ops.sum(b["x"]) * b["more"][2], args=(batch,))
    lab.equal([7.0 * part.sum() for part in parts(X[:4])], lab.components(result, strategy))
    for rows in (X[:3], X[:2], X[:1]):  # nothing is dropped
        [alone] = strategy.distribute_dataset([rows])
        lab.equal(parts(rows), lab.components(alone, strategy))
        lab.equal(rows.sum(axis=0), strategy.reduce("SUM", alone, axis=0))
    data = strategy.distribute_dataset(batch for batch in pairs())
    found = [pieces(lab, batch, strategy) for batch in data]
    lab.equal(expected_pieces(lab.replicas), found)
    lab.equal([], list(data))  # a generator serves once
    # Each replica would get all rows of what is no tuple, list or dict, such as a tokenizer's.
    with lab.raises(kd.errors.InputError, "type UserDict"):
        next(iter(strategy.distribute_dataset([collections.UserDict(x=X[:4])])))


@case
def what_an_element_is(lab, strategy):
    """`element_spec` has the types and shapes of a batch, with None as the number of rows."""
    data = strategy.distribute_dataset(pairs())
    spec = data.element_spec
    lab.equal(2, len(spec))
    for one, row, dtype in zip(spec, ((2,), ()), ("float32", "int32"), strict=True):
        lab.check(isinstance(one, kd.PerReplica), f"a PerReplica, received {one!r}")
        for part in one.values:
            lab.equal((None, *row), tuple(part.shape))
            lab.equal(dtype, keras.backend.standardize_dtype(part.dtype))
    # Asking does not use up a batch.
    lab.equal(3, len(list(data)))


@case
def input_options(lab, strategy):
    """`InputOptions` for buffers and devices do not change the batches."""
    for options in (
        kd.InputOptions(),
        kd.InputOptions(experimental_per_replica_buffer_size=5),
        kd.InputOptions(
            experimental_fetch_to_device=False,
            experimental_replication_mode=kd.InputReplicationMode.PER_WORKER,
            experimental_place_dataset_on_device=False,
            experimental_per_replica_buffer_size=1,
        ),
    ):
        data = strategy.distribute_dataset(pairs(), options)
        found = [pieces(lab, batch, strategy) for batch in data]
        lab.equal(expected_pieces(2), found)
    names = "fetch_to_device replication_mode place_dataset_on_device per_replica_buffer_size"
    theirs = collections.namedtuple(
        "InputOptions",
        [f"experimental_{name}" for name in names.split()],
        module="tensorflow.python.distribute.distribute_lib",
    )
    mode = kd.InputReplicationMode.PER_WORKER
    data = strategy.distribute_dataset(pairs(), theirs(True, mode, False, 2))
    lab.equal(expected_pieces(2), [pieces(lab, batch, strategy) for batch in data])
    for size in (0, 3):
        data = strategy.distribute_dataset(pairs(), theirs(None, mode, False, size))
        lab.equal(expected_pieces(2), [pieces(lab, batch, strategy) for batch in data])
    with lab.raises(ValueError, "buffer_size to be 0 or more"):
        strategy.distribute_dataset(pairs(), theirs(True, mode, False, -1))
    each = kd.InputOptions(experimental_replication_mode=kd.InputReplicationMode.PER_REPLICA)
    with lab.raises(kd.errors.UnsupportedError, "PER_WORKER.*Received: options=.*from_function"):
        strategy.distribute_dataset(pairs(), each)


@case
def an_array_that_is_filled_anew(lab, strategy):
    """A data source may write each batch into the same array or tensor."""

    def of_arrays():
        rows = np.empty((SIZE, 2), "float32")
        for number in range(4):
            rows[:] = number
            yield rows

    def of_tensors():  # where they can be written to, only PyTorch's
        for rows in of_arrays():
            yield tensor[:].copy_(torch.from_numpy(rows))

    sources = [of_arrays]
    if lab.backend == "torch":
        tensor = torch.empty(SIZE, 2)
        sources.append(of_tensors)
    for source in sources:
        for data, expected in (
            (strategy.distribute_dataset(source()), [0, 0, 1, 1, 2, 2, 3, 3]),
            (strategy.distribute_datasets_from_function(lambda _, s=source: s()), [0, 1, 2, 3]),
        ):
            found = [part for batch in data for part in lab.components(batch, strategy)]
            lab.equal(expected, [int(part.mean()) for part in found])


@case
def an_iteration_left_early(lab, strategy):
    """A loop may end early, and one dataset may have two iterators at once."""
    data = strategy.distribute_dataset(pairs())
    for _ in data:
        break
    one, other = iter(data), iter(data)
    first = [lab.components(next(it)[1], strategy) for it in (one, other, one)]
    lab.equal([[Y[:2], Y[2:4]]] * 2 + [[Y[4:6], Y[6:8]]], first)


@case(replicas=(1, 2))
def an_iterator_in_a_function(lab, strategy):
    """Iterators have `get_next` and `element_spec`; a traced function cannot call `next`.

    It would return the same batch in each call. Only PyTorch, which does not trace, and a
    distributed `tf.data` dataset on TensorFlow return the next batch.
    """
    data = strategy.distribute_dataset(pairs())
    iterator = iter(data)
    lab.equal(pieces(lab, next(iter(data)), strategy), pieces(lab, iterator.get_next(), strategy))
    rows, _ = iterator.element_spec
    lab.equal((None, 2), tuple((rows.values[0] if lab.replicas > 1 else rows).shape))

    @kd.function
    def step(iterator):
        return strategy.run(lambda x, y: ops.sum(y), args=next(iterator))

    if lab.backend == "torch":
        lab.equal(sum(Y[4:8]), strategy.reduce("SUM", step(iterator), axis=None))
        return
    with lab.raises(kd.errors.UnsupportedError, "Expected batches to be taken outside.*Received: "):
        step(iterator)
    second = lab.components(next(iterator)[1], strategy)  # none was lost
    lab.equal(Y[4 : 4 + SIZE // lab.replicas], second[0])
    if lab.backend == "tensorflow" and lab.replicas > 1:
        own = iter(strategy.distribute_dataset(tf_dataset()))
        found = [strategy.reduce("SUM", step(own), axis=None) for _ in range(3)]
        lab.equal([sum(Y[:4]), sum(Y[4:8]), sum(Y[8:])], found)


@case(replicas=(2, 3))
def a_function_for_all_replicas(lab, strategy):
    """With PER_WORKER, each replica takes the next batch of one pipeline."""
    seen = []

    def dataset_fn(context):
        seen.append(context)
        size = context.get_per_replica_batch_size(2 * lab.replicas)
        return [X[i : i + size] for i in range(0, 10, size)]

    data = strategy.distribute_datasets_from_function(dataset_fn)
    lab.equal([(1, 0, lab.replicas)], [
        (c.num_input_pipelines, c.input_pipeline_id, c.num_replicas_in_sync) for c in seen
    ])  # fmt: skip
    rounds = [lab.components(batch, strategy) for batch in data]
    lab.equal(len(data), len(rounds))
    flat = [part for one in rounds for part in one]
    lab.equal(X, np.concatenate(flat))
    lab.check(all(len(part) in (0, 2) for part in flat), "batches are handed on as they are")
    lab.equal(len(rounds), len(list(data)))
    one = kd.OneDeviceStrategy("cpu:0")
    alone = one.distribute_datasets_from_function(
        lambda here: [np.ones((here.get_per_replica_batch_size(4), 1), "float32")] * 3
    )
    lab.equal([4.0, 4.0, 4.0], [one.run(ops.sum, args=(batch,)) for batch in alone])


@case(backends=("tensorflow",), replicas=(2, 3))
def lengths_of_native_datasets(lab, strategy):
    """A distributed `tf.data` dataset has a length, or TensorFlow's error if it is unknown."""
    data = strategy.distribute_dataset(tf_dataset())

    @kd.function
    def rows_of(data):
        total = 0
        for _, y in data:  # a loop in the graph
            rows = strategy.run(lambda y: ops.shape(y)[0], args=(y,))
            total += strategy.reduce("SUM", rows, axis=None)
        return total

    lab.equal(10, rows_of(data))
    lab.equal([3, 3], [len(data), len(list(data))])
    endless = strategy.distribute_dataset(tf_dataset().repeat())
    unknown = strategy.distribute_dataset(tf_dataset().filter(lambda x, y: True))
    for dataset, said in ((endless, "infinite"), (unknown, "unknown")):
        lab.check(dataset, "true, however long")
        with lab.raises(TypeError, said):
            len(dataset)
    each = kd.InputOptions(experimental_replication_mode=kd.InputReplicationMode.PER_REPLICA)
    for options, expected in ((each, 3), (None, -(-3 // lab.replicas))):
        made = strategy.distribute_datasets_from_function(lambda _: tf_dataset(), options)
        lab.equal([expected, expected], [len(made), len(list(made))])


@case(replicas=(2, 3))
def a_function_for_each_replica(lab, strategy):
    """With PER_REPLICA, a replica whose pipeline ends earlier gets batches without rows."""

    def dataset_fn(context):
        lab.equal(lab.replicas, context.num_input_pipelines)
        index = context.input_pipeline_id
        return [np.full((2,), 10 * index + turn, "int32") for turn in range(2 - (index == 1))]

    options = kd.InputOptions(experimental_replication_mode=kd.InputReplicationMode.PER_REPLICA)
    data = strategy.distribute_datasets_from_function(dataset_fn, options)
    lab.equal(2, len(data))
    for _ in range(2):
        rounds = [lab.components(batch, strategy) for batch in data]
        lab.equal([[10 * i] * 2 for i in range(lab.replicas)], rounds[0])
        second = [np.full((0 if i == 1 else 2,), 10 * i + 1, "int32") for i in range(lab.replicas)]
        lab.equal(second, rounds[1])


def pipelined(name):
    def check(lab):
        strategy = lab.strategy()
        make, _ = SOURCES[name]
        each = kd.InputOptions(experimental_replication_mode=kd.InputReplicationMode.PER_REPLICA)
        data = strategy.distribute_datasets_from_function(lambda _: make(), each)
        for _ in range(2):
            found = [pieces(lab, batch, strategy) for batch in data]
            lab.equal([[[part, part] for part in batch] for batch in pairs()], found)
        data = strategy.distribute_datasets_from_function(lambda _: make())
        lab.check(isinstance(data, kd.DistributedDataset), "a DistributedDataset")
        for _ in range(2):
            found = [pieces(lab, batch, strategy)[1] for batch in data]
            flat = [part for one in found for part in one]
            lab.equal(Y, np.concatenate(flat))

    return check


for _name in ("tf_data", "DataLoader", "PyDataset", "rows"):
    case(
        name=f"pipelines_of_{_name}",
        title=f"A function may make the source `{_name}` for all replicas, or for each replica",
    )(pipelined(_name))


@case
def rows_of_arrays(lab, strategy):
    """`experimental_make_numpy_dataset` yields rows, makes batches, and shuffles by a seed."""
    rows = strategy.experimental_make_numpy_dataset({"x": X, "y": Y})
    lab.equal(10, len(rows))
    lab.equal({"x": X[0], "y": Y[0]}, next(iter(rows)))
    batches = rows.batch(4, drop_remainder=True)
    lab.equal([2, 2], [len(batches), len(list(batches))])
    lab.equal([Y[:4], Y[4:8], Y[8:]], [batch["y"] for batch in rows.batch(4)])
    for wrong in ((X, Y[:4]), (), np.float32(3.0)):
        with lab.raises(kd.errors.InputError, "Expected arrays with the same number.*Received: "):
            strategy.experimental_make_numpy_dataset(wrong)
    with lab.raises(ValueError, "Expected batch_size to be positive.*Received: batch_size=0"):
        rows.batch(0)
    shuffled = rows.shuffle(seed=3).batch(10)
    orders = [next(iter(shuffled))["y"] for _ in range(2)]
    lab.check((orders[0] != orders[1]).any(), "another order each time")
    lab.equal(np.sort(orders[0]), Y)
    again = next(iter(rows.shuffle(seed=3).batch(10)))
    lab.equal(orders[0], again["y"])
    lab.equal(X[again["y"]], again["x"])
