"""Runs that are interrupted and started again: to the last bit those that nothing interrupted."""

import contextlib
import os
import resource
import socket
import stat
import subprocess
import sys
import warnings
from unittest import mock

import numpy as np

from tests.conformance.double import FLOAT64, double_precision
from tests.conformance.interruptions import (
    BATCH,
    BATCHES,
    EPOCHS,
    ROWS,
    InterruptionError,
    arrays,
    exact,
    interrupting,
    network,
    run,
    same,
)
from tests.conformance.lab import fresh, optimizer_values, values
from tests.conformance.lazy import kd, keras
from tests.conformance.models import regression
from tests.conformance.registry import case


def scaling_rate(epoch, rate):
    return rate * 0.8


def rate_of(model):
    return float(keras.ops.convert_to_numpy(model.optimizer.learning_rate))


def callbacks_with_plain_state(folder):
    class Rates(keras.callbacks.Callback):
        """Changes the rate as an epoch begins, by draws of its own, and notes all rates."""

        def __init__(self):
            super().__init__()
            self.shown = []
            self.generator = np.random.default_rng(3)

        def on_epoch_begin(self, epoch, logs=None):
            factor = self.generator.uniform(0.9, 1.0)
            self.model.optimizer.learning_rate = rate_of(self.model) * factor

        def on_train_batch_end(self, batch, logs=None):
            self.shown.append((rate_of(self.model), logs["loss"]))

    return [
        keras.callbacks.LearningRateScheduler(scaling_rate),
        Rates(),
        keras.callbacks.EarlyStopping(
            "val_loss", mode="max", patience=5, restore_best_weights=True
        ),
        keras.callbacks.ReduceLROnPlateau("loss", patience=0, min_delta=9.0, cooldown=1),
        keras.callbacks.CSVLogger(folder / "new.csv"),
        keras.callbacks.CSVLogger(folder / "appended.csv", append=True),
        keras.callbacks.TerminateOnNaN(),
    ]


@case("restarts", replicas=(2,))
def callbacks(lab):
    """Callbacks that set the rate, remember weights, or write lines."""
    # Twice in one epoch, and again between a line of its end and the backup of it.
    exact(lab, arrays(), callbacks_with_plain_state, at=(13, 15, 16.5))


@case("restarts", replicas=(2,))
def averages(lab):
    """`SwapEMAWeights` with gradient accumulation, and `ModelCheckpoint` of the best."""

    def build():
        optimizer = keras.optimizers.SGD(
            0.1, momentum=0.5, use_ema=True, gradient_accumulation_steps=2
        )
        return network(optimizer)

    def listed(folder):
        class Best(keras.callbacks.ModelCheckpoint):
            @property
            def shown(self):
                return [self.best]

        return [
            keras.callbacks.SwapEMAWeights(swap_on_epoch=True),
            Best(folder / "w.weights.h5", "val_loss", save_best_only=True, save_weights_only=True),
        ]

    exact(lab, arrays(), listed, build=build)


@case("restarts", replicas=(2,))
def warmup(lab):
    """`LearningRateWarmup`, over more than the first epoch."""
    exact(
        lab,
        arrays(shuffle="batch"),
        lambda folder: [kd.callbacks.LearningRateWarmup(epochs=2.5)],
        build=lambda: network(keras.optimizers.SGD(0.2)),
    )


def tf_data(pipeline, rows=ROWS):
    import tensorflow as tf

    def data():
        tf.random.set_seed(4)
        return {"x": pipeline(tf.data.Dataset.from_tensor_slices(regression(rows)))}

    return data


@case("restarts", replicas=(2,))
def tf_data_shuffled(lab):
    """A `tf.data` pipeline that is shuffled anew in each epoch."""
    exact(lab, tf_data(lambda rows: rows.shuffle(16).batch(BATCH).prefetch(2)))


@case("restarts", replicas=(2,))
def tf_data_repeated(lab):
    """A `tf.data` pipeline that is shuffled, and repeated over the ends of epochs."""
    data = tf_data(lambda rows: rows.shuffle(16).repeat().batch(BATCH).prefetch(2), ROWS - 2)
    exact(lab, data, steps_per_epoch=BATCHES)


def loader(own=False):
    """A shuffling DataLoader's arguments to fit."""
    import torch

    torch.manual_seed(6)  # Keras seeds it on PyTorch alone
    options = {"generator": torch.Generator().manual_seed(8)} if own else {}
    x, y = map(torch.from_numpy, regression(ROWS))
    rows = torch.utils.data.TensorDataset(x, y)
    return {"x": torch.utils.data.DataLoader(rows, batch_size=BATCH, shuffle=True, **options)}


@case("restarts", replicas=(2,))
def data_loader(lab):
    """A `DataLoader` that shuffles, by torch's generator or by one of its own."""
    exact(lab, loader)
    exact(lab, lambda: loader(own=True))


@case("restarts", replicas=(2,))
def py_dataset(lab):
    """A `PyDataset` that shuffles its rows as an epoch ends, by draws of its own."""
    exact(lab, shuffling)


def shuffling():
    """The arguments to fit of a PyDataset that shuffles by itself."""

    class Shuffling(keras.utils.PyDataset):
        def __init__(self):
            super().__init__()
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
    import grain

    shuffled = grain.MapDataset.source(rows).shuffle(seed=3)
    options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    return shuffled.to_iter_dataset(options).batch(BATCH)


def grain_loader(rows):
    import grain

    sampler = grain.samplers.IndexSampler(ROWS, shuffle=True, seed=3, num_epochs=1)
    options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    batch = grain.transforms.Batch(BATCH)
    return grain.DataLoader(
        data_source=rows, sampler=sampler, operations=[batch], read_options=options
    )


def stateful_loader(rows):
    """A `DataLoader` with the methods of torchdata's StatefulDataLoader, which is not here."""
    import torch

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


@case("restarts", replicas=(2,))
def entry_30_loaders_with_places(lab):
    """Grain and stateful loaders are exact in mid-epoch, and read nothing again (issue 30.8)."""
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
def entry_30_read_ahead(lab):
    """The same where Keras reads a batch ahead, as on JAX's accelerators (issue 30.8)."""
    from keras.src.backend.jax.trainer import JAXEpochIterator

    def read_ahead(self):
        return self._one_batch_ahead_iterator(self.data_adapter.get_jax_iterator())

    repeated = tf_data(lambda rows: rows.shuffle(16).repeat().batch(BATCH), ROWS - 2)
    with mock.patch.object(JAXEpochIterator, "_get_iterator", read_ahead):
        exact(lab, repeated, steps_per_epoch=BATCHES)
        exact(lab, lambda: {"x": grain_map(Rows([].append))}, at=(7,))


@case("restarts", replicas=(2,))
def generator(lab):
    """A generator, which has to pass over the batches of all epochs."""

    def batches():
        x, y = regression(ROWS)
        while True:
            chosen = np.random.randint(ROWS, size=BATCH)
            yield x[chosen], y[chosen]

    exact(lab, lambda: {"x": batches()}, steps_per_epoch=BATCHES)


@case("restarts", replicas=(2,))
def as_many_steps_as_batches(lab):
    """Arrays with `steps_per_epoch`, which Keras begins again as an epoch ends."""
    exact(lab, arrays(), at=(8.5, 13), steps_per_epoch=BATCHES)


@case("restarts", replicas=(2,), backends=("torch",))
def as_many_steps_as_batches_of_other_data(lab):
    """The same of a `DataLoader` and a `PyDataset`; fewer steps are said to be lost."""
    for of in (loader, lambda: loader(own=True), shuffling):
        exact(lab, of, at=(8.5, 13), steps_per_epoch=BATCHES)
    exact(lab, arrays(), at=(), lost=["steps_per_epoch=4"], steps_per_epoch=4)


@case("restarts", replicas=(2,))
def several_steps(lab):
    """Three steps in an execution, of which the last one of an epoch has two."""
    build = lambda: network(steps_per_execution=3)  # noqa: E731
    exact(lab, arrays(), at=(9, 14, 16.5), build=build)


@case("restarts", replicas=(2,))
def stopped_already(lab):
    """A run that EarlyStopping has stopped, and that dies as it ends, trains no further."""

    class Dying(keras.callbacks.Callback):
        def __init__(self, dies):
            super().__init__()
            self.dies = dies

        def on_train_end(self, logs=None):
            if self.dies:
                raise InterruptionError

    def listed(dies):
        stop = keras.callbacks.EarlyStopping(
            "loss", patience=0, min_delta=9.0, restore_best_weights=True
        )
        return lambda folder: [Dying(dies), stop]

    with lab.folder() as one, lab.folder() as other:
        expected = run(lab, one, arrays(), listed(False), epochs=5)
        with contextlib.suppress(InterruptionError):
            run(lab, other, arrays(), listed(True), epochs=5)
        found = run(lab, other, arrays(), listed(False), epochs=5)
    lab.equal(found["epochs"], [0, 1])
    lab.check(same(found, expected), f"{found} instead of {expected}")


@case("restarts", replicas=(2,))
def said(lab):
    """What cannot be brought back is in one warning; `state_dict` brings back the hidden."""

    class Hidden:
        """Holds a number where nobody looks."""

        __slots__ = ("number",)

        def __init__(self):
            self.number = 0

    class Counting(keras.callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.hidden = Hidden()

        def on_train_batch_end(self, batch, logs=None):
            self.hidden.number += 1

        @property
        def shown(self):
            return self.hidden.number

    class Saying(Counting):
        def state_dict(self):
            return {"number": self.hidden.number}

        def load_state_dict(self, state):
            self.hidden.number = state["number"]

    exact(lab, arrays(), lambda folder: [Saying()], at=(13,))
    seen = []
    note = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(epoch))
    with lab.folder() as folder, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        run(lab, folder, arrays(), lambda folder: [Counting(), note])
        messages = [str(one.message) for one in told if "cannot bring back" in str(one.message)]
        messages = lab.everyone(messages)[0]
    lab.check(len(messages) == 1, f"{len(messages)} warnings")
    for part in ("Counting.hidden (Hidden)", "LambdaCallback: seen (list)", "state_dict()"):
        lab.check(part in messages[0], f"{part!r} is not in {messages[0]!r}")


@case("restarts", replicas=(2,))
def on_twice_as_many_replicas(lab):
    """Interrupted on 2 replicas, and gone on with 4: the untouched run, but for rounding."""

    def build():
        layers = keras.layers
        norm = layers.BatchNormalization(momentum=0.5)
        model = keras.Sequential(
            [keras.Input((4,)), layers.Dense(4, "tanh"), norm, layers.Dense(1)]
        )
        model.compile(keras.optimizers.Adam(), "mse", metrics=["mae"])
        return model

    more, options = lab.with_replicas(2 * lab.replicas), {"build": build, "epochs": 2}
    with double_precision(lab.backend), lab.folder() as whole, lab.folder() as torn:
        expected = run(lab, whole, arrays(), **options)
        with contextlib.suppress(InterruptionError):
            run(lab, torn, arrays(), at=7, **options)
        lab.equal(expected, run(more, torn, arrays(), **options), FLOAT64)


@case("restarts", replicas=(2,))
def two_calls_of_fit(lab):
    """A script that calls `fit` twice with one folder, and dies in the second call."""

    def script(folder, at=None):
        _forget_earlier_calls()
        fresh()
        with lab.strategy().scope():
            model = network()
        kept = []
        for struck in (None, at):
            callbacks = [kd.callbacks.BackupAndRestore(folder, save_freq=3)]
            callbacks += [interrupting(struck)] if struck else []
            arguments = {**arrays()(), "epochs": 2, "verbose": 0, "callbacks": callbacks}
            kept.append(model.fit(**arguments).history)
        return [kept, values(model.variables)]

    with lab.folder() as one, lab.folder() as other, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        expected = script(one)
        with contextlib.suppress(InterruptionError):
            script(other, at=13)
        found = script(other)
        messages = [str(one.message) for one in told if "a later call of fit" in str(one.message)]
        messages = lab.everyone(messages)[0]
    lab.check(same(found, expected), f"{found} instead of {expected}")
    lab.check(len(messages) == 1, f"{messages}")


def _forget_earlier_calls():
    """As a new process does."""
    from kerasdist.callbacks.backup import run_files

    run_files._ENDED.clear()


def small_model(change):
    layers = keras.layers
    two = [
        layers.Dense(4, "relu" if change == "activation" else "tanh", name="one"),
        layers.Dense(4, "tanh", name="two"),
    ]
    last = [
        layers.Dropout(0.5 if change == "dropout" else 0.3),
        layers.Dense(2 if change == "units" else 1),
    ]
    model = keras.Sequential([keras.Input((4,)), *(two[::-1] if change == "swap" else two), *last])
    optimizer = keras.optimizers.SGD(
        0.02 if change == "learning rate" else 0.01, momentum=0.5 if change == "momentum" else 0.9
    )
    model.compile(
        keras.optimizers.Adam() if change == "optimizer" else optimizer,
        "mae" if change == "loss" else "mse",
        metrics=["mse" if change == "metrics" else "mae"],
    )
    return model


def small(lab, folder, at=None, change="", listed=(), **options):
    """A process of a script that trains two epochs; ``change``: what is another than before."""
    fresh()
    seed = 9 if change == "rows" else 0
    with lab.strategy().scope():
        model = small_model(change)
    x, y = regression(ROWS + (4 if change == "number of rows" else 0), seed=seed)
    if change == "units":
        y = np.concatenate([y, y], axis=-1)
    given = {"x": x, "y": y, "batch_size": 8 if change == "batch size" else BATCH}
    if change == "class weight":
        given["class_weight"] = {0: 2.0}
    if change == "sample weight":
        given["sample_weight"] = np.ones(len(x), "float32")
    if change == "steps":
        given["steps_per_epoch"] = 4
    if change == "kind of data":
        pairs = [(x[at : at + BATCH], y[at : at + BATCH]) for at in range(0, ROWS, BATCH)]
        given = {"x": (pair for pair in pairs * 2), "steps_per_epoch": BATCHES}
    keras.utils.set_random_seed(5)
    backup = kd.callbacks.BackupAndRestore(folder, save_freq=3, **options)
    stop = [interrupting(at)] if at else []
    history = model.fit(
        epochs=2, shuffle=True, verbose=0, callbacks=[backup, *stop, *listed], **given
    )
    return [history.history, values(model.variables), optimizer_values(model)]


# What another script has, and how the error says so.
CHANGES = {
    "swap": "\"Dense 'one'\" in the backup and \"Dense 'two'\" in this script",
    "activation": "(Dense 'one').activation is 'tanh' in the backup and 'relu' in this script",
    "dropout": "rate is 0.3 in the backup and 0.5 in this script",
    "units": "units is 1 in the backup and 2 in this script",
    "momentum": "optimizer.momentum is 0.9 in the backup and 0.5 in this script",
    "optimizer": "optimizer.class is 'SGD' in the backup and 'Adam' in this script",
    "loss": "loss is 'mse' in the backup and 'mae' in this script",
    "metrics": "metrics[0] is 'mae' in the backup and 'mse' in this script",
    "number of rows": "x.shape[0] is 32 in the backup and 36 in this script",
    "batch size": "batch_size is 4 in the backup and 8 in this script",
    "class weight": "class_weight is None in the backup and",
    "sample weight": "sample_weight is 'nothing' in the backup and",
    "steps": "steps_per_epoch is None in the backup and 4 in this script",
    "kind of data": "'generator' in this script",
}


def refused(lab, folder, *parts, **options):
    """`fit` refuses the folder, and says why on every worker."""
    error = ""
    try:
        small(lab, folder, **options)
    except kd.errors.BackupError as raised:
        error = str(raised)
    for told in lab.everyone(error):
        for part in parts:
            lab.check(part in told, f"{options}: {part!r} is not in {told!r}")


@case("restarts", replicas=(2,))
def defect_29_of_another_script(lab):
    """A backup of another model or of other data is refused, with what differs."""
    with lab.folder() as whole, lab.folder() as folder:
        expected = small(lab, whole)
        with contextlib.suppress(InterruptionError):
            small(lab, folder, at=7)
        lab.everyone("interrupted")
        kept = sorted(path.name for path in folder.iterdir())
        for change, said in CHANGES.items():
            refused(lab, folder, "of this call of fit", said, "another folder", change=change)
        lab.everyone("refused")
        lab.equal(sorted(path.name for path in folder.iterdir()), kept)
        lab.check(same(small(lab, folder), expected), "the refused backups are not what they were")


@case("restarts", replicas=(2,))
def entry_32_weights_alone(lab):
    """`resume="weights"` begins another call anew, with the weights of the backup (issue 32.6)."""

    class Noting(keras.callbacks.Callback):
        """Notes the weights and the number of updates, once."""

        def __init__(self, batch):
            super().__init__()
            self.batch, self.seen = batch, None

        def on_train_batch_begin(self, batch, logs=None):
            if batch == self.batch and self.seen is None:
                self.seen = values([*self.model.weights, self.model.optimizer.iterations])

    def script(folder, batch, at=None, **options):
        note, history = Noting(batch), {}
        with contextlib.suppress(InterruptionError):
            history, *_ = small(lab, folder, at=at, listed=[note], resume="weights", **options)
        lab.everyone("ended")
        return note.seen, history

    changes = {"batch size": "batch_size is", "optimizer": "optimizer.class is"}
    for change, said in changes.items():
        with lab.folder() as folder, warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            [*kept, updates], _ = script(folder, 6, at=7)  # the backup is after batch 6
            lab.equal(updates, 6)
            # This one ends after a backup of its own, from which the next one goes on as ever.
            [*taken, updates], _ = script(folder, 0, at=4, change=change)
            lab.check(same(taken, kept) and updates == 0, f"{change}: {taken} instead of {kept}")
            _, history = script(folder, 0, change=change)
            lab.equal(len(history["loss"]), 2)
            messages = [str(one.message) for one in told if "begins anew" in str(one.message)]
            messages = lab.everyone(messages)[0]
        lab.check(len(messages) == 1 and said in messages[0], f"{messages}")
    with lab.folder() as folder:
        script(folder, 6, at=7)
        refused(lab, folder, "Expected the weights of the backup", change="units", resume="weights")


@case("restarts", replicas=(2,))
def defect_29_what_may_differ(lab):
    """With another learning rate, or other rows, a warning says what goes on."""
    said = {
        "learning rate": "learning_rate is 0.0",
        "rows": "data.x.content is",
    }
    for change, part in said.items():
        with lab.folder() as folder, warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            with contextlib.suppress(InterruptionError):
                small(lab, folder, at=7)
            found = small(lab, folder, change=change)
            messages = [str(one.message) for one in told if part in str(one.message)]
            messages = lab.everyone(messages)[0]
        lab.check(len(messages) == 1, f"{change}: {messages}")
        if change == "learning rate":  # as plain Keras does it, which restores the optimizer
            with lab.folder() as folder:
                lab.check(same(found, small(lab, folder)), "the rate is not the backup's")


@case("restarts", replicas=(2,))
def defect_29_a_full_disk(lab):
    """Where the disk takes no backup, a warning says so, and training goes on."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    class Filling(keras.callbacks.Callback):
        """Lets the process write no long file, from the end of the first epoch to the second."""

        def on_epoch_end(self, epoch, logs=None):
            if epoch == 0:
                resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))

        def on_epoch_begin(self, epoch, logs=None):
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    with lab.folder() as whole, lab.folder() as folder, warnings.catch_warnings(record=True) as all:
        warnings.simplefilter("always")
        try:
            expected = small(lab, whole)
            found = small(lab, folder, listed=[Filling()], delete_checkpoint=False)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        lab.everyone("trained")
        names = sorted(path.name for path in folder.iterdir())
        messages = [str(one.message) for one in all if "could not be written" in str(one.message)]
        messages = lab.everyone(messages)
    lab.check(same(found, expected), f"{found} instead of {expected}")
    lab.equal(len(messages[0]), 1)
    lab.check("Backup 3" in messages[0][0] and "File too large" in messages[0][0], messages[0][0])
    of_chief = [name for name in names if "-part" not in name]
    lab.equal(of_chief, ["backup-000000000005.kdb", "backup-000000000006.kdb"])
    of_parts = {name[: len("backup-000000000005")] for name in names if name not in of_chief}
    lab.check(of_parts <= {name[:-4] for name in of_chief}, f"{names}")


# Another run, which uses the folder until its input ends.
OTHER = """
import fcntl, json, os, socket, sys
file = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
fcntl.lockf(file, fcntl.LOCK_EX)
os.write(file, json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "since": "noon"}).encode())
print("holds", flush=True)
sys.stdin.read()
"""  # noqa: E501


@contextlib.contextmanager
def another_run(lab, folder):
    """Another process that trains with the same folder, on the chief's machine."""
    if lab.everyone(os.getpid())[0] != os.getpid():
        yield lab.everyone(None)[0]
        lab.everyone("ended")
        return
    command = [sys.executable, "-c", OTHER, str(folder / "in-use.json")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as process:
        process.stdout.readline()
        yield lab.everyone(process.pid)[0]
        process.stdin.close()
        process.wait(30)
    lab.everyone("ended")


@case("restarts", replicas=(2,))
def defect_29_two_runs_in_one_folder(lab):
    """A second run in a folder is refused, until the first has ended."""
    with lab.folder() as folder:
        with contextlib.suppress(InterruptionError):
            small(lab, folder, at=7)
        lab.everyone("interrupted")
        kept = sorted(path.name for path in folder.iterdir())
        with another_run(lab, folder) as pid:
            refused(lab, folder, f"process {pid} on {socket.gethostname()}", "since noon")
        left = {path.name for path in folder.iterdir()} - {"in-use.json"}
        lab.equal(sorted(left), kept)
        lab.everyone("looked")
        small(lab, folder)
        lab.everyone("trained")
        lab.equal(list(folder.iterdir()), [])


@case("restarts", replicas=(2,))
def defect_24_backups_are_the_owners(lab):
    """Nobody else can read a backup, unless the script says so."""
    for options, mode in (({}, 0o600), ({"file_mode": 0o640}, 0o640)):
        with lab.folder() as folder:
            small(lab, folder, delete_checkpoint=False, **options)
            lab.everyone("trained")
            modes = {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
            lab.equal(modes, {mode})
            lab.everyone("looked")


@case("restarts", replicas=(2,))
def defect_29_crafted_backups(lab):
    """Values of another kind in a backup with a valid digest end in a clear error."""
    from kerasdist.callbacks.backup import storage

    with lab.folder() as folder:
        with contextlib.suppress(InterruptionError):
            small(lab, folder, at=7)
        lab.everyone("interrupted")
        [path, older] = storage.newest_first(folder)
        stored, newest = storage.read(path), storage.number_of(path)
        # Where workers divide the state, None stands for what their parts hold.
        forms = enumerate(stored.forms)
        arrays = [None if form is None else stored.array(number) for number, form in forms]
        is_writer = lab.everyone(os.getpid())[0] == os.getpid()
        if is_writer:
            older.unlink()
        names = ("number", "epoch", "batches", "random", "position", "forms")
        crafted = [{name: one} for name in names for one in (None, "one")]
        crafted += [{"position": {**stored.facts["position"], "passed": "one"}}]
        crafted += [{"random": {"python": 3}}, {"callbacks": None}, {"callbacks": [3]}]
        for change in crafted:
            if is_writer:
                facts = {**stored.facts, **change}
                storage.write(folder, newest, facts, arrays)
            lab.everyone("written")
            said = []
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                try:
                    small(lab, folder, at=1)  # it begins anew
                except kd.errors.BackupError as error:
                    said = [str(error)]
                except InterruptionError:
                    said = [str(one.message) for one in told if "is not used" in str(one.message)]
            said = lab.everyone(said)[0]
            lab.check(len(said) == 1, f"{str(change)[:200]}: {said}")
