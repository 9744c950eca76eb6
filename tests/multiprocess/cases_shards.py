"""Who reads what: own rows of arrays, and the policies by which workers share a dataset."""

import contextlib
import functools
import tempfile
from pathlib import Path

import numpy as np

from kerasdist.input.sharding import bounds_of_replicas
from tests.conformance.lazy import kd, keras, tf, torch
from tests.conformance.models import stack
from tests.conformance.registry import case
from tests.facade.sources import Sequence


def batch(rows: int, seed: int):
    x = np.random.default_rng(seed).normal(size=(rows, 3)).astype("float32")
    return x, (x @ [[1.0], [-2.0], [0.5]] + 0.25 * seed).astype("float32")


# The last one is smaller, and there are more of them than workers, but no multiple.
BATCHES = [*(batch(6, seed) for seed in range(4)), batch(3, 9)]

# Of workers with data of their own: neither batches nor their number are equal.
OWN = [
    [batch(4, 1), batch(4, 2)],
    [batch(4, 3), batch(2, 4), batch(4, 5)],
    [batch(4, 6)],
    [batch(4, 7), batch(4, 8)],
]


def joined(batches):
    return tuple(np.concatenate(parts) for parts in zip(*batches, strict=True))


def by_steps(own):
    """The global batches of workers that have these batches, step by step."""
    steps = range(max(map(len, own)))
    batches = [joined([theirs[step] for theirs in own if step < len(theirs)]) for step in steps]
    return [one for one in batches if len(one[0])]  # a step for which nobody has rows is none


def in_turns(batches, workers):
    """What each worker has, step by step, if it takes every `workers`-th batch."""
    return [
        [
            tuple(array[begin:end] for array in one)
            for one in batches[rank::workers]
            for begin, end in bounds_of_replicas(len(one[0]), workers)
        ]
        for rank in range(workers)
    ]


@functools.cache
def linear_model(strategy):
    """Returns the same model for all cases, so that its compiled programs serve all of them."""
    with strategy.scope():
        return stack([keras.layers.Dense(1)], inputs=(3,))


def check_training(lab, data, batches, epochs=2):
    found = []
    for strategy, source in ((kd.get_strategy(), Sequence(batches)), (lab.strategy(), data)):
        model = linear_model(strategy)
        model.set_weights([np.full((3, 1), 0.1), np.zeros(1)])
        history = model.fit(source, epochs=epochs, shuffle=False, verbose=0).history
        used = model.predict(source, verbose=0), model.evaluate(source, verbose=0)
        found.append([history, model.get_weights(), *used])
    lab.equal(*found)


def rows_here(lab, dataset):
    local = lab.strategy().local_results
    return [
        np.concatenate([keras.ops.convert_to_numpy(part) for part in local(x)]) for x, _ in dataset
    ]


def check_loop(lab, dataset, own):
    """In a loop this worker gets its own batches, and as many as the worker that has most."""
    steps = len(by_steps(own))
    expected = [x for x, _ in own[lab.job.rank]][:steps]
    expected += [np.zeros((0, 3), "float32")] * (steps - len(expected))
    for _ in range(2):
        lab.equal(expected, rows_here(lab, dataset))


def options(policy):
    return kd.InputOptions(auto_shard_policy=kd.AutoShardPolicy[policy])


class Touched(np.ndarray):
    """An array that notes which rows are taken out of it."""

    rows = ()

    def __array_finalize__(self, whole):
        self.rows = ()

    def __getitem__(self, key):
        part = super().__getitem__(key)
        if isinstance(self.rows, list) and part.ndim == self.ndim:
            self.rows.extend(np.asarray(part)[:, 0].astype(int).tolist())
        return part


@case("workers")
def arrays_by_rows(lab):
    """Of arrays a worker takes its own rows alone, shuffled or not."""
    from kerasdist import keras_compat

    x = np.arange(72, dtype="float32").reshape(24, 3) / 3
    size = 12  # which 2, 3 and 4 replicas divide
    replicas = lab.strategy().replica_set
    for shuffle in (False, True):
        counted = x.view(Touched)
        counted.rows = []
        adapter = replicas.data_adapter(
            keras_compat.get_data_adapter(counted, x[:, :1], batch_size=size, shuffle=shuffle)
        )
        if lab.backend == "tensorflow":  # has the arrays as tensors, in which nothing is noted
            batches = [one.rows[0][:, 0].numpy().astype(int) for one in adapter.get_tf_dataset()]
            mine = np.concatenate(batches).tolist()
        else:
            batches = {"jax": "get_jax_iterator", "torch": "get_torch_dataloader"}[lab.backend]
            lab.equal(2, len(list(getattr(adapter, batches)())))
            mine = counted.rows
        lab.equal(24 // lab.job.num_workers, len(mine))
        lab.equal(list(range(24)), sorted(row for rows in lab.everyone(mine) for row in rows))


@case("workers")
def data_policy(lab):
    """DATA: a worker reads every W-th batch of a PyDataset or of a list, for W steps each."""
    strategy, workers, rank = lab.strategy(), lab.job.num_workers, lab.job.rank
    asked = set()

    class Dataset(keras.utils.PyDataset):
        num_batches = len(BATCHES)

        def __getitem__(self, index):
            asked.add(index)
            return BATCHES[index]

    own = in_turns(BATCHES, workers)
    check_training(lab, strategy.distribute_dataset(Dataset(), options("DATA")), by_steps(own))
    lab.equal(list(range(rank, len(BATCHES), workers)), sorted(asked))
    dataset = strategy.distribute_dataset(BATCHES, options("DATA"))
    lab.equal(max(map(len, own)), len(dataset))  # of 4 workers' last step, nobody has rows
    check_loop(lab, dataset, own)
    check_training(lab, strategy.distribute_dataset(BATCHES, options("BATCH")), BATCHES, epochs=1)


@case("workers")
def data_loader(lab):
    """DATA: a DataLoader's sampler is wrapped, and told the epoch; other rows are not loaded."""
    data = torch.utils.data
    x, y = joined(BATCHES)
    order = np.random.default_rng(0).permutation(len(x))
    loaded, told = set(), []

    class Rows(data.Dataset):
        def __len__(self):
            return len(x)

        def __getitem__(self, index):
            loaded.add(int(index))
            return x[index], y[index]

    class Sampler(data.Sampler):
        def set_epoch(self, epoch):
            told.append(epoch)

        def __iter__(self):
            return iter(order.tolist())

        def __len__(self):
            return len(order)

    loader = data.DataLoader(Rows(), batch_size=6, sampler=Sampler())
    numbers = [order[begin : begin + 6] for begin in range(0, len(order), 6)]
    own = in_turns([(x[chosen], y[chosen]) for chosen in numbers], lab.job.num_workers)
    dataset = lab.strategy().distribute_dataset(loader, options("DATA"))
    check_training(lab, dataset, by_steps(own))
    mine = np.concatenate(numbers[lab.job.rank :: lab.job.num_workers])
    lab.equal(sorted(mine.tolist()), sorted(loaded))
    lab.equal(list(range(len(told))), told)
    lab.check(len(told) >= 2, f"no epochs: {told}")


@case("workers")
def off_policy(lab):
    """OFF: workers have data of their own, of other sizes, and one's end early."""
    own = OWN[: lab.job.num_workers]
    dataset = lab.strategy().distribute_dataset(own[lab.job.rank], options("OFF"))
    check_training(lab, dataset, by_steps(own))
    check_loop(lab, dataset, own)


@case("workers")
def off_policy_without_data(lab):
    """OFF: a worker without any batch is named, on all workers."""
    mine = [] if lab.job.rank == 1 else BATCHES
    dataset = lab.strategy().distribute_dataset(mine, options("OFF"))
    with lab.raises(kd.errors.InputError, "at least one batch.*without a batch on worker 1"):
        next(iter(dataset))


@case("workers")
def pipeline_a_worker(lab):
    """distribute_datasets_from_function: a pipeline a worker, until the last one has ended."""
    own, told = OWN[: lab.job.num_workers], []

    def made(context):
        told.append((context.num_input_pipelines, context.input_pipeline_id))
        lab.equal(lab.replicas, context.num_replicas_in_sync)
        # A replica takes a batch: to one of several, each in as many pieces.
        here = len(strategy.local_replicas)
        return [
            tuple(array[begin:end] for array in one)
            for one in own[context.input_pipeline_id]
            for begin, end in bounds_of_replicas(len(one[0]), here)
        ]

    strategy = lab.strategy()
    dataset = strategy.distribute_datasets_from_function(made)
    lab.equal([(lab.job.num_workers, lab.job.rank)], told)
    check_training(lab, dataset, by_steps(own))
    check_loop(lab, dataset, own)


@contextlib.contextmanager
def text_files(batches):
    """A tf.data pipeline over files of text, one for each of the batches."""

    def parsed(line):
        row = tf.ensure_shape(tf.strings.to_number(tf.strings.split(line, ",")), [4])
        return row[:3], row[3:]

    with tempfile.TemporaryDirectory() as folder:
        paths = []
        for index, (x, y) in enumerate(batches):
            paths.append(str(Path(folder, f"{index}.csv")))
            np.savetxt(paths[-1], np.concatenate([x, y], 1), "%.9g", delimiter=",")
        yield tf.data.TextLineDataset(paths).map(parsed).batch(4)


@case("workers")
def file_policy(lab):
    """FILE: a worker reads every W-th file; fewer files than workers are refused."""
    strategy, workers = lab.strategy(), lab.job.num_workers
    with text_files(BATCHES) as pipeline:
        dataset = strategy.distribute_dataset(pipeline, options("FILE"))
        lines = [joined(BATCHES[rank::workers]) for rank in range(workers)]
        own = [
            [
                tuple(array[begin + first : begin + last] for array in theirs)
                for begin in range(0, len(theirs[0]), 4)
                for first, last in bounds_of_replicas(min(4, len(theirs[0]) - begin), workers)
            ]
            for theirs in lines
        ]
        check_training(lab, dataset, by_steps(own))
    with text_files(BATCHES[:1]) as pipeline, lab.raises(kd.errors.InputError, "fewer files than"):
        strategy.distribute_dataset(pipeline, options("FILE"))
    for dataset in (BATCHES, pipeline.from_tensor_slices(BATCHES[0]).batch(2)):
        with lab.raises(kd.errors.InputError, "at least . files, one a worker.*use AutoShard"):
            strategy.distribute_dataset(dataset, options("FILE"))


@case("workers")
def options_of_the_dataset(lab):
    """A policy in tf.data.Options is obeyed in fit and in loops, if InputOptions say none."""
    said = tf.data.Options()
    said.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    dataset = tf.data.Dataset.from_tensor_slices(joined(BATCHES)).batch(6).with_options(said)
    own = in_turns(BATCHES, lab.job.num_workers)
    check_training(lab, dataset, by_steps(own))
    distribute = lab.strategy().distribute_dataset
    check_loop(lab, distribute(dataset), own)
    whole = [x for x, _ in BATCHES]
    here = rows_here(lab, distribute(dataset, options("AUTO")))
    everyone = zip(*lab.everyone([rows.tolist() for rows in here]), strict=True)
    lab.equal(whole, [np.concatenate(parts).astype("float32") for parts in everyone])


@case("workers")
def refusals(lab):
    """A dataset that cannot be iterated again, and a model from outside, are refused."""
    strategy = lab.strategy()
    once = strategy.distribute_dataset((one for one in BATCHES), options("OFF"))
    with lab.raises(kd.errors.InputError, "iterated again.*a generator"):
        linear_model(strategy).fit(once, verbose=0)
    plain = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    plain.compile("sgd", "mse")
    with lab.raises(kd.errors.InputError, "made in a strategy's scope"):
        plain.fit(strategy.distribute_dataset(BATCHES, options("DATA")), verbose=0)
