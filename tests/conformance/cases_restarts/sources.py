"""Each source of data goes on where the interrupted run was."""

import random
from unittest import mock

import numpy as np

from tests.conformance.interruptions import BATCH, BATCHES, EPOCHS, ROWS, arrays, exact
from tests.conformance.lazy import grain, keras, tf, torch
from tests.conformance.models import regression
from tests.conformance.registry import case


def tf_data(pipeline, rows=ROWS):
    def data():
        tf.random.set_seed(4)
        return {"x": pipeline(tf.data.Dataset.from_tensor_slices(regression(rows)))}

    return data


@case("restarts", replicas=(2,))
def tf_data_shuffled(lab):
    """A `tf.data` pipeline that is shuffled anew in each epoch."""
    exact(lab, tf_data(lambda rows: rows.shuffle(16).batch(BATCH).prefetch(2)))
    # From the second epoch on all is read from the cache.
    exact(lab, tf_data(lambda rows: rows.shuffle(16).batch(BATCH).cache().prefetch(2)), at=(13,))

    def pipeline_of_python(rows):
        signature = rows.element_spec
        made = tf.data.Dataset.from_generator(lambda: rows, output_signature=signature)
        return made.shuffle(16).batch(BATCH)

    exact(lab, tf_data(pipeline_of_python), at=(13,))  # which is read again


@case("restarts", replicas=(2,), like="restarts.tf_data_shuffled")
def pipeline_that_draws(lab):
    """What Python draws for a pipeline, which TensorFlow reads ahead, is said to be lost."""

    def pipeline(rows):
        def drawn():
            for x, y in rows.as_numpy_iterator():
                yield x + np.random.normal(size=x.shape), y + random.random()

        signature = rows.element_spec
        return tf.data.Dataset.from_generator(drawn, output_signature=signature).batch(BATCH)

    exact(lab, tf_data(pipeline), at=(), lost=["what Python draws for a tf.data pipeline"])


@case("restarts", replicas=(2,), like="restarts.tf_data_shuffled")
def tf_data_repeated(lab):
    """A `tf.data` pipeline that is shuffled, and repeated over the ends of epochs."""
    data = tf_data(lambda rows: rows.shuffle(16).repeat().batch(BATCH).prefetch(2), ROWS - 2)
    exact(lab, data, steps_per_epoch=BATCHES)
    # From a backup after an epoch's last batch, and then from that of the epoch's end.
    often = (("save_freq", BATCHES),)
    exact(lab, data, steps_per_epoch=BATCHES, backups=often, at=(8.5, 9))


def loader(own=False):
    """A shuffling DataLoader's arguments to fit."""
    torch.manual_seed(6)  # Keras seeds it on PyTorch alone
    options = {"generator": torch.Generator().manual_seed(8)} if own else {}
    x, y = map(torch.from_numpy, regression(ROWS))
    rows = torch.utils.data.TensorDataset(x, y)
    return {"x": torch.utils.data.DataLoader(rows, batch_size=BATCH, shuffle=True, **options)}


@case("restarts", replicas=(2,))
def data_loader(lab):
    """A `DataLoader` that shuffles, by torch's generator or by one of its own."""
    exact(lab, loader)
    exact(lab, lambda: loader(own=True), at=(13,))


@case("restarts", replicas=(2,))
def py_dataset(lab):
    """A `PyDataset` that shuffles its rows by draws of its own; that threads read ahead is said."""
    exact(lab, shuffling)
    ahead = ["workers have read ahead (workers=1)"]
    exact(lab, lambda: shuffling(workers=2), at=(), lost=ahead, epochs=1)


def shuffling(**options):
    """The arguments to fit of a PyDataset that shuffles by itself."""

    class Shuffling(keras.utils.PyDataset):
        def __init__(self):
            super().__init__(**options)
            self.rows, self.targets = regression(ROWS)
            self.order = np.arange(ROWS)
            self.generator = np.random.default_rng(2)

        def __len__(self):
            return BATCHES

        def __getitem__(self, index):
            chosen = self.order[index * BATCH : (index + 1) * BATCH]
            noise = self.generator.normal(size=(BATCH, 4)).astype("float32")
            return self.rows[chosen] + noise, self.targets[chosen]

        def on_epoch_end(self):
            self.generator.shuffle(self.order)

    return {"x": Shuffling(), "shuffle": False}


@case("restarts", replicas=(2,))
def validation_data(lab):
    """Data of validation that are other ones each time, of which some are read (`val_loss`)."""

    def validated(source, **options):
        return lambda: {**arrays()(), "validation_data": source()["x"], **options}

    shuffled = tf_data(lambda rows: rows.shuffle(16).batch(BATCH).prefetch(2))
    some = {"validation_steps": 3}
    reads_ahead = lab.backend == "tensorflow"
    for source in (shuffling, shuffled, lambda: loader(own=True)):
        steps = {} if reads_ahead else some
        # From a backup before any validation, of an epoch's end, and within the third epoch.
        exact(lab, validated(source, **steps), at=(7, 10, 20))
    if reads_ahead:
        said = ["of 8 batches only validation_steps=3"]
        exact(lab, validated(counting, **some), at=(), lost=said)

    def batches():
        while True:
            yield regression(BATCH)

    endless = validated(lambda: {"x": batches()}, **some)
    exact(lab, endless, at=(), lost=["of validation_data, the place of a generator"])


def counting():
    """The arguments to fit of a PyDataset that counts what is read of it."""

    class Counting(keras.utils.PyDataset):
        def __init__(self):
            super().__init__()
            self.rows, self.targets = regression(ROWS)
            self.read = 0

        def __len__(self):
            return BATCHES

        def __getitem__(self, index):
            self.read += 1
            chosen = slice(index * BATCH, (index + 1) * BATCH)
            return self.rows[chosen], self.targets[chosen]

    return {"x": Counting()}


class Rows:
    """Rows to read by number, which reports what is read, and may add noise."""

    generator = None

    def __init__(self, report):
        self.x, self.y = regression(ROWS)
        self.report = report

    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        self.report(int(index))
        noise = 0 if self.generator is None else self.generator.normal()
        return (self.x[index] + noise).astype("float32"), self.y[index]

    def __repr__(self):  # which Grain compares
        return "Rows()"


def grain_map(rows):
    """Grain's own shuffle; rows are read in the order of the batches, none ahead."""
    shuffled = grain.MapDataset.source(rows).shuffle(seed=3)
    options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    return shuffled.to_iter_dataset(options).batch(BATCH)


def grain_loader(rows):
    sampler = grain.samplers.IndexSampler(ROWS, shuffle=True, seed=3, num_epochs=1)
    options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    batch = grain.transforms.Batch(BATCH)
    return grain.DataLoader(
        data_source=rows, sampler=sampler, operations=[batch], read_options=options
    )


def stateful_loader(rows):
    """A `DataLoader` with the methods of torchdata's StatefulDataLoader, which is not here."""

    class Stateful(torch.utils.data.DataLoader):
        def __iter__(self):
            to = vars(self).pop("to", None)
            self.state = to or {"order": self.generator.get_state(), "passed": 0}
            self.generator.set_state(self.state["order"])
            order = torch.randperm(ROWS, generator=self.generator).tolist()
            if to is None:  # else its own generator is where the loader's state is not
                torch.rand(1, generator=self.generator)
            return self.batches(order)

        def batches(self, order):
            for at in range(self.state["passed"] * BATCH, ROWS, BATCH):
                self.state = {**self.state, "passed": at // BATCH + 1}
                yield self.collate_fn([self.dataset[row] for row in order[at : at + BATCH]])

        def state_dict(self):
            return self.state

        def load_state_dict(self, state):
            self.to = state

    rows.generator = np.random.default_rng(2)
    return Stateful(rows, batch_size=BATCH, generator=torch.Generator().manual_seed(8))


LOADERS = (grain_map, grain_loader, stateful_loader)


@case("restarts", replicas=(2,), like="restarts.data_loader")
def loaders_with_places(lab):
    """Grain and stateful loaders are exact in mid-epoch, and read nothing again."""
    for made in LOADERS:
        read = []  # by each run

        def data(made=made, read=read):
            read.append([])
            return {"x": made(Rows(read[-1].append))}

        exact(lab, data, at=(13,))
        whole, *_, last = read
        # The last run goes on from the backup after the third batch of the second epoch.
        passed = (BATCHES + 3) * BATCH
        left = EPOCHS * ROWS - passed
        lab.equal(len(whole) - passed, len(last))
        lab.equal(whole[-left:], last[-left:])


@case("restarts", replicas=(2,), backends=("jax",))
def read_ahead(lab):
    """The same where Keras reads a batch ahead, as on JAX's accelerators."""
    from keras.src.backend.jax.trainer import JAXEpochIterator

    def read_ahead(self):
        return self._one_batch_ahead_iterator(self.data_adapter.get_jax_iterator())

    repeated = tf_data(lambda rows: rows.shuffle(16).repeat().batch(BATCH), ROWS - 2)
    with mock.patch.object(JAXEpochIterator, "_get_iterator", read_ahead):
        exact(lab, repeated, steps_per_epoch=BATCHES)
        exact(lab, lambda: {"x": grain_map(Rows([].append))}, at=(7,))


@case("restarts", replicas=(2,), like="restarts.tf_data_shuffled")
def generator(lab):
    """A generator, which passes over the batches of all epochs; arrays with `steps_per_epoch`."""

    def batches():
        x, y = regression(ROWS)
        while True:
            chosen = np.random.randint(ROWS, size=BATCH)
            yield x[chosen], y[chosen]

    exact(lab, lambda: {"x": batches()}, steps_per_epoch=BATCHES)
    # Which Keras begins again as an epoch ends.
    exact(lab, arrays(), at=(8.5, 13), steps_per_epoch=BATCHES)


@case("restarts", replicas=(2,), backends=("torch",))
def as_many_steps_as_batches(lab):
    """As many steps as batches of a `DataLoader`, a `PyDataset`; fewer are said to be lost."""
    for of in (loader, lambda: loader(own=True), shuffling):
        exact(lab, of, at=(8.5, 13), steps_per_epoch=BATCHES)
    exact(lab, arrays(), at=(), lost=["steps_per_epoch=4"], steps_per_epoch=4)
