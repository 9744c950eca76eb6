"""Workers that do not do the same are told where they differ, before they compute; and go on."""

import contextlib
import os

import numpy as np

from tests.conformance.lab import values
from tests.conformance.lazy import jax, kd, keras, tf, torch
from tests.conformance.models import regression, stack
from tests.conformance.registry import case
from tests.facade.sources import Sequence
from tests.multiprocess.loops import noting

ROWS, BATCH = 12, 4


def _model(lab, activation="tanh", rate=0.2, optimizer="sgd", **compiled):
    def build():
        hidden = keras.layers.Dense(4, activation, name="hidden")
        last = keras.layers.Dense(1, name="last")
        layers = [hidden, keras.layers.Flatten(), keras.layers.Dropout(rate), last]
        return stack(layers, optimizer, **compiled)

    return lab.made(build)


def _fit(model, data=None, **given):
    x, y = data or regression(ROWS)
    return model.fit(x, y, **{"batch_size": BATCH, "verbose": 0, **given})


def _refused(lab, said, call):
    """All workers refuse, with words for the last worker's value and then the first's."""
    last = lab.job.num_workers - 1
    one, other = said[1:] if len(said) == 3 else (".*", ".*")
    # Of two workers the chief's value comes last, of three the one that most have.
    others = "worker 0" if last == 1 else f"workers {', '.join(map(str, range(last)))}"
    expected = f"Received: {said[0]}={one} on worker {last}, {other} on {others}[. ]"
    with lab.raises(kd.errors.DisagreementError, expected):
        call()


@case("workers")
def on_the_model(lab):
    """Another activation, rate of dropout, learning rate, loss, or function is named."""
    pick = lab.pick
    model = _model(lab, activation=pick("relu", "tanh"))
    x, y = regression(ROWS)
    said = r"layers\[1\]\.activation", "'relu'", "'tanh'"
    _refused(lab, said, lambda: _fit(model))
    _refused(lab, said, lambda: model.train_on_batch(x, y))
    model = _model(lab, rate=pick(0.5, 0.2))
    _refused(lab, (r"layers\[3\]\.rate", "0.5", "0.2"), lambda: _fit(model))
    model = _model(lab, optimizer=keras.optimizers.SGD(0.1, momentum=pick(0.9, 0.8)))
    _refused(lab, (r"optimizer\.momentum", "0.9", "0.8"), lambda: _fit(model))
    model = _model(lab, loss=pick("mae", "mse"))
    _refused(lab, (r"compile\.loss", "'mae'", "'mse'"), lambda: _fit(model))
    model = _model(lab, activation=pick(lambda x: 2 * x, lambda x: 3 * x))
    _refused(lab, (r"layers\[1\]\.activation\.code",), lambda: _fit(model))
    model = _model(lab)
    model.layers[2].rate = pick(0.3, 0.2)
    _refused(lab, (r"layers\[3\]\.rate", "0.3", "0.2"), lambda: _fit(model))
    model.layers[2].rate = 0.2
    _fit(model)  # and go on
    lab.alike([array.tolist() for array in values(model.weights)])


@case("workers")
def on_the_call(lab):
    """Other settings, data, or callbacks' settings are named, and a model that one has made."""
    odd, pick = lab.is_last, lab.pick
    model = _model(lab)
    x, y = regression(ROWS)
    moved = np.array(x)
    moved[7, 2] += 1  # Any row
    swapped = np.array(x)
    swapped[[4, 5]] = swapped[[5, 4]]

    def stopping(patience):
        return keras.callbacks.EarlyStopping("loss", patience=patience)

    calls = {
        (r"argument shuffle", "False", "True"): {"shuffle": pick(False, True)},
        (r"argument batch_size", "6", "4"): {"batch_size": pick(6, 4)},
        (r"argument epochs", "3", "2"): {"epochs": pick(3, 2)},
        (r"argument class_weight\.1", "2.0", "1.0"): {"class_weight": {0: 1.0, 1: pick(2.0, 1.0)}},
        (r"argument validation_split", "0.5", "0.25"): {"validation_split": pick(0.5, 0.25)},
        (r"callbacks\[0\]\.patience", "3", "5"): {"callbacks": [stopping(pick(3, 5))]},
        (r"x\.checksum of rows",): {"data": (pick(moved, x), y)},
        (r"x\.checksum of rows", ".*", ".*"): {"data": (pick(swapped, x), y)},
        (r"sample_weight\.checksum of rows",): {
            "sample_weight": np.float32([1] * 7 + [1 + odd] + [1] * 4)
        },
        (r"x\.dtype", "'float64'", "'float32'"): {"data": (x.astype(pick("f8", "f4")), y)},
        (r"x\.shape", r"'\(11, 4\)'", r"'\(12, 4\)'"): {"data": (x[odd:], y[odd:])},
        (r"validation_data\[0\]\.checksum of rows",): {"validation_data": (pick(moved, x), y)},
    }
    for said, given in calls.items():
        _refused(lab, said, lambda given=given: _fit(model, **given))
    _refused(lab, (r"x\.checksum of rows",), lambda: model.evaluate(pick(moved, x), y, verbose=0))
    _refused(lab, (r"x\.checksum of rows",), lambda: model.predict(pick(moved, x), verbose=0))
    _fit(model)
    with lab.strategy().scope():
        kept = keras.Variable(1.0) if odd else None
    _refused(lab, ("new variables in the scope", "1", "0"), lambda: _fit(model))
    del kept
    _fit(model)
    lab.alike([array.tolist() for array in values(model.weights)])


@case("workers")
def agree_in_spite_of(lab):
    """What a worker may have of its own is no reason to refuse."""
    rank = lab.job.rank
    if rank:
        keras.layers.Flatten()  # it counts up the names of layers
    keras.utils.set_random_seed(rank)

    def loss(y, p, rank=rank):
        return keras.ops.mean(keras.ops.square(y - p), -1)

    class Own(keras.callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.rank = rank

    with lab.folder() as folder:
        csv = keras.callbacks.CSVLogger(str(folder / f"log-{rank}.csv"))
        callbacks = [keras.callbacks.EarlyStopping("loss"), Own()]
        model = _model(lab, loss=loss, activation=lambda x: x / 2, metrics=["mae"])
        given = {"callbacks": [*callbacks, csv] if rank == 0 else callbacks}
        _fit(model, verbose=2 * (rank == 0), epochs=2, **given)
    lab.alike([array.tolist() for array in values(model.weights)])
    if rank:
        keras.layers.Dense(2)
    # Its variables have other paths on each worker.
    model = lab.made(lambda: stack([keras.layers.Dense(4), keras.layers.Dense(1)], "adam"))
    _fit(model)
    lab.alike([array.tolist() for array in values([*model.weights, *model.optimizer.variables])])


def _assigns(lab, name, by):
    """What changes a variable of the last layer, on the last worker alone, after a batch."""

    class Assigns(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 1 and lab.is_last:
                variable = getattr(self.model.layers[-1], name)
                variable.assign(variable + by)

    return Assigns()


@case("workers")
def on_a_weight(lab):
    """A weight, or a moving statistic, that one worker alone has changed is named."""
    model = _model(lab)
    said = "same weights at the end of epoch 1. Received: .*last/bias='norm .*' on worker "
    with lab.raises(kd.errors.DisagreementError, said):
        _fit(model, epochs=2, callbacks=[_assigns(lab, "bias", 1.0)])
    with lab.folder() as folder:
        backup = kd.callbacks.BackupAndRestore(folder / "backup", save_freq=2)
        said = "same weights at batch 2 of epoch 1. Received: .*last/bias"
        with lab.raises(kd.errors.DisagreementError, said):
            _fit(_model(lab), callbacks=[_assigns(lab, "bias", 1.0), backup])
        written = list((folder / "backup").glob("backup-*"))
        lab.check(not written, f"a backup was written: {written}")
    with lab.told("by rounding") as warned:
        _fit(_model(lab), callbacks=[_assigns(lab, "bias", 1e-6)])
    lab.check(warned, "no warning")
    layers = keras.layers
    model = lab.made(lambda: stack([layers.Dense(1), layers.BatchNormalization()], "sgd"))
    _fit(model)
    said = "same weights at the end of epoch 1. Received: .*/moving_mean='norm .*' on worker "
    with lab.raises(kd.errors.DisagreementError, said):
        _fit(model, epochs=2, callbacks=[_assigns(lab, "moving_mean", 1.0)])


@contextlib.contextmanager
def _settings(lab):
    """Settings of the framework and of Keras, with other values on the last worker."""
    epsilon = keras.config.epsilon()

    def set_all(is_odd):
        keras.config.set_epsilon(1e-3 if is_odd else epsilon)
        if lab.backend == "jax":
            jax.config.update("jax_default_prng_impl", "rbg" if is_odd else "threefry2x32")
        if lab.backend == "tensorflow":
            tf.config.run_functions_eagerly(is_odd)

    set_all(lab.is_last)
    try:
        yield
    finally:
        set_all(False)


@case("workers")
def on_a_setting_of_the_framework(lab):
    """Another PRNG (JAX), or functions that run eagerly (TensorFlow), are named."""
    names = {"jax": "jax_default_prng_impl", "tensorflow": "run_functions_eagerly"}
    x, y = regression(ROWS)
    model = _model(lab)
    with _settings(lab):
        if lab.backend in names:
            named = rf"Received: settings\.{names[lab.backend]}="
            with lab.raises(kd.errors.DisagreementError, named):
                lab.strategy(batch_norm="synchronized")
        said = r"settings\.epsilon=0\.001 on worker .*"
        if lab.backend in names:
            said += rf"further differences: settings\.{names[lab.backend]}\)"
        for call in (lambda: _fit(model), lambda: model.train_on_batch(x, y)):
            with lab.raises(kd.errors.DisagreementError, said):
                call()
    _fit(model)  # and go on
    lab.alike([array.tolist() for array in values(model.weights)])


def _batches(sizes):
    return Sequence([regression(size) for size in sizes])


def _cut(x, y):
    return [(x[at : at + BATCH], y[at : at + BATCH]) for at in range(0, len(x), BATCH)]


@case("workers")
def on_what_is_trainable(lab):
    """A callback of one worker that freezes a layer is named, and nobody waits."""

    def freezing(event, freezes=lab.is_last):
        def freeze(self, number, logs=None):
            if freezes and number == 1:
                self.model.layers[0].trainable = False

        return type("Freezes", (keras.callbacks.Callback,), {event: freeze})()

    places = {"on_epoch_begin": "beginning of epoch 2", "on_epoch_end": "end of epoch 2"}
    model = _model(lab)
    for event, place in places.items():
        said = f"same trainable weights at the {place}.*kernel=False on worker "
        with lab.raises(kd.errors.DisagreementError, said):
            _fit(model, epochs=3, callbacks=[freezing(event)])
        model.layers[0].trainable = True
    if lab.backend != "jax":  # whose optimizers refuse it, in plain Keras too
        for event in ("on_train_batch_begin", "on_train_batch_end"):
            _fit(_model(lab), callbacks=[freezing(event, freezes=True)])


@case("workers")
def on_a_batch(lab):
    """A batch of another size on one worker is found at the end of the epoch."""
    odd, last, model = lab.is_last, lab.job.num_workers - 1, _model(lab)
    sizes = [2 * lab.replicas] * 3
    _fit(model, (_batches(sizes), None), batch_size=None, epochs=2)
    said = f"same batches before the end of epoch 1. Received: batch 2='.*' on worker {last}, "
    steps = []
    note = noting("on_train_batch_end", steps)
    for apart in (lambda: [1, 1 + odd, 1], lambda: [1, 1 + odd, 2 - odd]):
        with lab.raises(kd.errors.DisagreementError, said):
            data = _batches([factor * size for factor, size in zip(apart(), sizes, strict=True)])
            _fit(model, (data, None), batch_size=None, shuffle=False, callbacks=[note])
    lab.equal([0, 1, 2, 0, 1, 2], steps)
    _fit(model, (_batches(sizes), None), batch_size=None)  # and go on
    lab.alike([array.tolist() for array in values(model.weights)])


def _sources(lab, x, y):
    batches = _cut(x, y)
    sources = {
        "PyDataset": lambda: Sequence(batches),
        "generator": lambda: (one for one in batches),
    }
    if lab.backend == "tensorflow":
        whole = tf.data.Dataset.from_tensor_slices((x, y))
        sources["tf.data"] = lambda: whole.batch(BATCH)
        weighted = whole.map(lambda x, y: (x, y, tf.constant(1.0)))
        sources["tf.data with weights"] = lambda: weighted.batch(BATCH)
    if lab.backend == "torch":
        data = torch.utils.data
        arrays = [keras.ops.convert_to_tensor(array) for array in (x, y)]
        sources["DataLoader"] = lambda: data.DataLoader(data.TensorDataset(*arrays), BATCH)
    return sources


@case("workers")
def on_the_order_of_a_source(lab):
    """Another order of the rows that each worker reads whole is found at the first step."""
    odd, model = lab.is_last, _model(lab)
    x, y = regression(ROWS)
    equal, other = (_sources(lab, np.roll(x, by, 0), np.roll(y, by, 0)) for by in (0, 3 * odd))
    found = {}
    for kind, make in other.items():
        said = (
            "same batches before the next step.*Received: x of batch 1=.*checksum.*on worker .*, "
            r".* on worker.* \(further differences: y.*Shuffle with a seed"
        )
        with lab.raises(kd.errors.DisagreementError, said):
            model.fit(make(), epochs=2, verbose=0)
        found[kind] = model.fit(equal[kind](), verbose=0).history
    lab.alike(found)
    for call in (model.evaluate, model.predict):
        with lab.raises(kd.errors.DisagreementError, said):
            call(other["PyDataset"](), verbose=0)
    batches, epochs = _cut(x, y), []

    def shuffle(epoch, logs):  # the second epoch alone is another one on each worker
        epochs.append(epoch)
        batches[:] = _cut(*(np.roll(array, 1 + odd, 0) for array in (x, y)))

    shuffling = keras.callbacks.LambdaCallback(on_epoch_end=shuffle)
    said = "same batches before the next step.*Received: x of batch 1="
    with lab.raises(kd.errors.DisagreementError, said):
        model.fit(Sequence(batches), epochs=3, verbose=0, callbacks=[shuffling])
    lab.equal([0], epochs)
    own = lab.strategy().distribute_datasets_from_function(
        lambda context: list(equal["generator"]())[:: 1 + context.input_pipeline_id]
    )
    model.fit(own, verbose=0, steps_per_epoch=2)  # each worker has data of its own
    lab.alike([array.tolist() for array in values(model.weights)])


@case("workers")
def on_a_later_batch(lab):
    """A row that differs after the first batch is found at the end of the epoch."""
    odd, model = lab.is_last, _model(lab)
    x, y = regression(5 * BATCH)
    wide = np.repeat(x, 40000, 1)  # more bytes than count
    row = 3 * BATCH + 2
    kinds = [("PyDataset", "y"), ("generator", "x")]
    for kind, name in kinds + [("tf.data", "x")] * (lab.backend == "tensorflow"):
        other = {"x": x + 0, "y": y + 0}
        other[name][row] += 5 * odd
        said = rf"same batches before the end of epoch 1.*Received: {name} of batch 4='.*' on w"
        with lab.raises(kd.errors.DisagreementError, said):
            model.fit(_sources(lab, **other)[kind](), verbose=0, epochs=2, shuffle=False)
    model.fit(Sequence(_cut(x, y)), verbose=0)
    changed = wide.copy()
    changed[row] += odd
    seen = rf"Received: x of batch 4='.*' on worker {lab.job.num_workers - 1}, "
    layers = [keras.layers.Lambda(lambda x: x[:, :1]), keras.layers.Dense(1)]
    model = lab.made(lambda: stack(layers, "sgd", inputs=wide.shape[1:]))
    with lab.raises(kd.errors.DisagreementError, seen):
        model.fit(Sequence(_cut(changed, y)), verbose=0, shuffle=False)
    validation = Sequence(_cut(x, y + odd * (np.arange(len(y)) == row)[:, None]))
    model = _model(lab)
    with lab.raises(kd.errors.DisagreementError, "same batches before.*y of batch"):
        model.fit(x, y, verbose=0, batch_size=BATCH, validation_data=validation)


@case("workers")
def draws_of_a_workers_own(lab):
    """Rows that come in one order, with other values, as of augmentation, get a warning."""
    x, y = regression(ROWS)
    drawn = x + 0.01 * lab.job.rank
    model = _model(lab)
    with lab.told("same batches") as texts:
        model.fit((one for one in _cut(drawn, y)), verbose=0)
    lab.check(len(texts) == 1, f"warnings: {texts}")
    lab.check("x of batch 1=" in texts[0] and "augmentation" in texts[0], texts[0])


@case("workers", backends=("jax",))
def on_a_program(lab):
    """On JAX workers compare programs, those of loops too: they hold what no setting says."""
    strategy = lab.strategy()
    factor = lab.pick(3.0, 2.0)
    hidden = {"factor": factor}  # nothing that is looked at otherwise

    def loss(y, p):
        return keras.ops.mean(keras.ops.square(y - p), -1) * hidden["factor"]

    @kd.function
    def scaled():
        return strategy.reduce("SUM", strategy.run(lambda: keras.ops.ones(3) * factor), axis=None)

    said = "same program. Received: line \\d+ of the program='.*3.0.*' on worker "
    for call in (lambda: _fit(_model(lab, loss=loss)), scaled):
        with lab.raises(kd.errors.DisagreementError, said):
            call()


@case("workers", backends=("jax",))
def on_a_later_program(lab):
    """The program for another shape is compared, too, and so are large constants."""
    scale = np.arange(100, dtype="float32")
    scale[70] += lab.is_last
    late = {"factor": lab.pick(3.0, 2.0)}
    size = 2 * lab.replicas

    def loss(y, p):
        factor = late["factor"] if y.shape[0] < size else 2.0
        return keras.ops.mean(keras.ops.square(y - p), -1) * factor

    def with_a_constant(y, p):
        return keras.ops.mean(keras.ops.square(y - p) * keras.ops.max(scale), -1)

    data = regression(2 * size + lab.replicas)
    said = "same batches before the end of epoch 1. Received: batch 3='.* program .*' on worker "
    with lab.raises(kd.errors.DisagreementError, said):
        _fit(_model(lab, loss=loss), data, batch_size=size, shuffle=False)
    said = "same program. Received: checksum of line \\d+=\\d+ on worker "
    with lab.raises(kd.errors.DisagreementError, said):
        _fit(_model(lab, loss=with_a_constant))


def _scaled(number, array):
    """A layer that multiplies by what its attributes hold."""

    class Scaled(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.seed = number  # which workers may have of their own, by its name
            self.array = np.array([array], "float32")

        def call(self, inputs):
            return inputs * self.seed * self.array[0]

    return Scaled()


def _losses_by_what_they_use(factor):
    """Losses that multiply by a factor, by where they have it from."""
    array = np.float32([1.0, factor])
    os.environ["FACTOR_OF_THE_LOSS"] = str(factor)

    def squares(error):
        return keras.ops.square(error)

    def nines(error):
        return keras.ops.abs(error) * 9

    helper = squares if factor == 1.0 else nines

    def made(weigh):
        return lambda y, p: keras.ops.mean(weigh(y - p), -1)

    return {
        "an array": made(lambda e: e * e * array[1]),
        "the environment": made(lambda e: e * e * float(os.environ["FACTOR_OF_THE_LOSS"])),
        "a helper's code": made(helper),
    }


@case("workers")
def on_what_code_uses(lab):
    """What a loss or layer uses is found at the first step, wherever it is kept.

    What is compared is what they compute.
    """
    factor = lab.pick(9.0, 1.0)
    said = "(same results of the first step.* loss=|same program)"
    for kind, loss in _losses_by_what_they_use(factor).items():
        steps = []
        note = noting("on_train_batch_end", steps)
        with lab.raises(kd.errors.DisagreementError, said):
            _fit(_model(lab, loss=loss), callbacks=[note])
        lab.check(not steps, f"{kind}: found after steps {steps}")
    near = 1.001 if factor > 1.0 else 1.0  # a thousandth, in a loss alone
    with lab.raises(kd.errors.DisagreementError, said):
        _fit(_model(lab, loss=_losses_by_what_they_use(near)["an array"], rate=0.0))
    for number, array in ((factor, 1.0), (1.0, factor)):
        layers = [_scaled(number, array), keras.layers.Dense(1)]
        model = lab.made(lambda layers=layers: stack(layers, "sgd"))
        with lab.raises(kd.errors.DisagreementError, said):
            _fit(model)
    model = _model(lab, loss=_losses_by_what_they_use(1.0)["an array"])
    _fit(model)  # and go on
    lab.alike([array.tolist() for array in values(model.weights)])
