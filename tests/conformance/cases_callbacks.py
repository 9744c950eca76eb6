"""Callbacks: the decisions, the logs and the files of one device (trap 10)."""

import contextlib
import csv
import tempfile
from pathlib import Path

import numpy as np

from tests.conformance.actions import evaluate, fit
from tests.conformance.lazy import keras
from tests.conformance.models import dense, regression
from tests.conformance.registry import case

N, BATCH = 11, 4


def data():
    x, y = regression(N)
    v, u = regression(6, seed=9)
    return x, y, (v, u)


def same_with(lab, *make, **options):
    """fit with the callbacks that ``make`` makes, epochs enough for them to act."""
    x, y, validation = data()
    options = {"epochs": 4, "validation_data": validation, "batch_size": BATCH, **options}
    return lab.same(
        lambda: dense(keras.optimizers.SGD(0.3)),
        fit(x, y, callbacks=lambda: [one() for one in make], **options),
        evaluate(x, y, batch_size=BATCH),
    )


@case("callbacks", like="callbacks.batch_logs")
def early_stopping(lab):
    """`EarlyStopping`, which restores the best weights."""
    same_with(
        lab,
        lambda: keras.callbacks.EarlyStopping(
            patience=1, min_delta=0.02, restore_best_weights=True, monitor="val_loss"
        ),
        epochs=12,
    )


@case("callbacks", like="callbacks.callback_reads_and_writes")
def rates(lab):
    """`ReduceLROnPlateau` and `LearningRateScheduler`."""
    callbacks = keras.callbacks
    same_with(
        lab,
        lambda: callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.7),
        lambda: callbacks.ReduceLROnPlateau("loss", patience=1, min_delta=0.1, factor=0.5),
    )


@case("callbacks")
def model_checkpoint(lab):
    """`ModelCheckpoint`: models and weights, by epoch and by batch; plain Keras loads them."""
    x, y, validation = data()
    with tempfile.TemporaryDirectory() as folder:

        def action(model):
            sub = Path(tempfile.mkdtemp(dir=folder))
            model.fit(
                x,
                y,
                batch_size=BATCH,
                epochs=3,
                validation_data=validation,
                verbose=0,
                callbacks=[
                    keras.callbacks.ModelCheckpoint(
                        sub / "{epoch}.weights.h5", save_weights_only=True
                    ),
                    keras.callbacks.ModelCheckpoint(sub / "best.keras", save_best_only=True),
                    keras.callbacks.ModelCheckpoint(
                        sub / "batch{batch}.weights.h5",
                        save_weights_only=True,
                        save_freq=2,
                    ),
                ],
            )
            kept = sorted(path.name for path in sub.iterdir())
            loaded = keras.models.load_model(sub / "best.keras")
            weights = {}
            for name in kept:
                if name.endswith(".weights.h5"):
                    fresh = dense()
                    fresh.load_weights(sub / name)
                    weights[name] = fresh.get_weights()
            return [kept, loaded.get_weights(), loaded.predict(x, verbose=0), weights]

        lab.same(dense, action)


@case("callbacks", like="callbacks.batch_logs")
def csv_logger(lab):
    """`CSVLogger` writes the same file."""
    x, y, _ = data()
    with tempfile.TemporaryDirectory() as folder:

        def action(model):
            path = Path(tempfile.mkdtemp(dir=folder)) / "log.csv"
            log = keras.callbacks.CSVLogger(path)
            model.fit(x, y, batch_size=BATCH, epochs=2, callbacks=[log], verbose=0)
            with path.open(encoding="utf-8") as file:
                rows = list(csv.DictReader(file))
            # "NA" stands where an epoch had no validation.
            number = lambda text: text if text == "NA" else float(text)  # noqa: E731
            return [{key: number(value) for key, value in row.items()} for row in rows]

        lab.same(dense, action)


@case("callbacks")
def batch_logs(lab):
    """Batch logs of fit, evaluate and predict, and the order of all hooks."""
    x, y, validation = data()

    def action(model):
        calls = []

        class Everything(keras.callbacks.Callback):
            def __getattribute__(self, name):
                if not name.startswith("on_"):
                    return super().__getattribute__(name)

                def hook(*arguments, logs=None):
                    if arguments and isinstance(arguments[-1], dict):
                        logs, arguments = arguments[-1], arguments[:-1]
                    numbers = {
                        key: np.array(keras.ops.convert_to_numpy(value))
                        for key, value in (logs or {}).items()
                        if key != "outputs"
                    }
                    shape = np.shape((logs or {}).get("outputs", ()))
                    calls.append([name, list(arguments), numbers, list(shape)])

                return hook

        hooks = Everything()
        model.fit(
            x,
            y,
            batch_size=BATCH,
            epochs=2,
            validation_data=validation,
            callbacks=[hooks],
            verbose=0,
        )
        model.evaluate(x, y, batch_size=BATCH, callbacks=[hooks], verbose=0)
        model.predict(x, batch_size=BATCH, callbacks=[hooks], verbose=0)
        return [call[0] for call in calls], calls

    lab.same(dense, action)


@case("callbacks", like="callbacks.batch_logs")
def terminate_on_nan(lab):
    """`TerminateOnNaN` stops in the batch where one device would."""
    x, y, _ = data()
    x[6] = np.nan

    def action(model):
        batches = []
        count = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: batches.append(batch)
        )
        stop = keras.callbacks.TerminateOnNaN()
        model.fit(
            x, y, batch_size=BATCH, shuffle=False, epochs=2, callbacks=[stop, count], verbose=0
        )
        return batches

    lab.same(dense, action)


@case("callbacks", like="callbacks.batch_logs")
def stop_in_a_batch(lab):
    """`model.stop_training` set in the middle of an epoch."""
    x, y, _ = data()

    def action(model):
        class Stop(keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                if batch == 1:
                    self.model.stop_training = True

        history = model.fit(x, y, batch_size=2, epochs=3, callbacks=[Stop()], verbose=0)
        return [history, int(keras.ops.convert_to_numpy(model.optimizer.iterations))]

    lab.same(dense, action)


@case("callbacks")
def backup_and_restore(lab):
    """`BackupAndRestore` resumes an interrupted fit where it was."""
    x, y, _ = data()

    class Interrupted(Exception):
        pass

    def interrupt(epoch, logs):
        if epoch == 1:
            raise Interrupted

    def build_and_run(strategy, folder):
        first = lab.run(dense, [], strategy)[0]
        options = {"batch_size": BATCH, "epochs": 4, "verbose": 0, "shuffle": False}
        backup = lambda: keras.callbacks.BackupAndRestore(folder)  # noqa: E731
        # Before it in the list: the epoch that is interrupted is not backed up.
        stop = keras.callbacks.LambdaCallback(on_epoch_end=interrupt)
        with contextlib.suppress(Interrupted):
            first.fit(x, y, callbacks=[stop, backup()], **options)
        resume = [lambda model: model.fit(x, y, callbacks=[backup()], **options)]
        return lab.run(dense, resume, strategy)[1]

    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as two:
        expected = build_and_run(None, str(Path(one) / "backup"))
        actual = build_and_run(lab.strategy(), str(Path(two) / "backup"))
    lab.equal([1, 2, 3], expected.results[0]["epoch"])
    lab.equal(expected.parts(True), actual.parts(True))


@case("callbacks")
def tensorboard(lab):
    """`TensorBoard` writes event files, with histograms."""
    x, y, validation = data()
    with tempfile.TemporaryDirectory() as folder:

        def action(model):
            sub = Path(tempfile.mkdtemp(dir=folder))
            board = keras.callbacks.TensorBoard(str(sub), histogram_freq=1, write_graph=False)
            model.fit(
                x, y, batch_size=BATCH, validation_data=validation, callbacks=[board], verbose=0
            )
            files = [path for path in sub.rglob("*") if path.is_file()]
            return sorted({str(path.parent.relative_to(sub)) for path in files})

        lab.same(dense, action)


@case("callbacks")
def callback_reads_and_writes(lab):
    """A callback that reads and writes weights and calls predict between batches."""
    x, y, _ = data()

    def action(model):
        seen = []

        class Meddle(keras.callbacks.Callback):
            def on_epoch_end(self, epoch, logs=None):
                seen.append(self.model.predict(x, batch_size=3, verbose=0))
                seen.append(self.model.evaluate(x, y, batch_size=3, verbose=0))
                self.model.set_weights([0.9 * value for value in self.model.get_weights()])

        model.fit(x, y, batch_size=BATCH, epochs=2, callbacks=[Meddle()], verbose=0)
        return seen

    lab.same(dense, action)


@case("callbacks")
def error_in_a_callback(lab):
    """A callback that raises: the error comes out, and the strategy goes on."""
    x, y, _ = data()

    def raising(batch, logs):
        raise KeyError("the user's own")

    strategy = lab.strategy()
    with strategy.scope():
        model = dense()
    callback = keras.callbacks.LambdaCallback(on_train_batch_end=raising)
    with lab.raises(KeyError, "the user's own"):
        model.fit(x, y, batch_size=BATCH, callbacks=[callback], verbose=0)
    lab.still_usable(strategy)
