"""Callbacks: the decisions, the logs and the files of one device (trap 10)."""

import contextlib
import tempfile
from pathlib import Path

import numpy as np

from tests.conformance.actions import evaluate, fit
from tests.conformance.interruptions import InterruptionError, interrupting_after
from tests.conformance.lazy import keras
from tests.conformance.models import dense, regression
from tests.conformance.registry import case

N, BATCH = 11, 4


def data():
    x, y = regression(N)
    v, u = regression(6, seed=9)
    return x, y, (v, u)


@case("callbacks", like="callbacks.batch_logs")
def early_stopping(lab):
    """`EarlyStopping`, callbacks that set the rate, `TerminateOnNaN`, `stop_training`."""
    x, y, validation = data()
    wrong = x.copy()
    wrong[6] = np.nan
    c = keras.callbacks

    class Stop(c.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 1:
                self.model.stop_training = True

    def stopping():
        best = {"restore_best_weights": True, "monitor": "val_loss"}
        return [c.EarlyStopping(patience=1, min_delta=0.02, **best)]

    def rates():
        plateau = c.ReduceLROnPlateau("loss", patience=1, min_delta=0.1, factor=0.5)
        return [c.LearningRateScheduler(lambda epoch, rate: rate * 0.7), plateau]

    options = {"batch_size": BATCH, "validation_data": validation}
    in_order = {"batch_size": BATCH, "shuffle": False, "epochs": 2}
    lab.same(
        lambda: dense(keras.optimizers.SGD(0.3)),
        fit(x, y, epochs=12, callbacks=stopping, **options),
        fit(x, y, epochs=4, callbacks=rates, **options),
        fit(x, y, epochs=3, batch_size=2, callbacks=lambda: [Stop()]),
        evaluate(x, y, batch_size=BATCH),
        lambda model: model.get_weights(),
        fit(wrong, y, callbacks=lambda: [c.TerminateOnNaN()], **in_order),
    )


@case("callbacks")
def model_checkpoint(lab):
    """`ModelCheckpoint`, `CSVLogger`, `TensorBoard`: the same files, which plain Keras loads."""
    x, y, validation = data()

    def action(model):
        c = keras.callbacks
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            listed = [
                c.ModelCheckpoint(folder / "{epoch}.weights.h5", save_weights_only=True),
                c.ModelCheckpoint(folder / "best.keras", save_best_only=True),
                c.ModelCheckpoint(
                    folder / "batch{batch}.weights.h5", save_weights_only=True, save_freq=2
                ),
                c.CSVLogger(folder / "log.csv"),
                c.TensorBoard(str(folder / "logs"), histogram_freq=1, write_graph=False),
            ]
            options = {"batch_size": BATCH, "epochs": 3, "validation_data": validation}
            model.fit(x, y, callbacks=listed, verbose=0, **options)
            loaded = keras.models.load_model(folder / "best.keras")
            weights = {}
            for path in folder.glob("*.weights.h5"):
                fresh = dense()
                fresh.load_weights(path)
                weights[path.name] = fresh.get_weights()
            head = (folder / "log.csv").read_text("utf-8").partition("\n")[0]
            rows = np.genfromtxt(folder / "log.csv", delimiter=",", skip_header=1)
            events = {path.parent.name for path in folder.glob("logs/*/*") if path.is_file()}
            loads = [loaded.get_weights(), loaded.predict(x, verbose=0)]
            return [sorted(events), head, rows, loads, weights]

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
        options = {"batch_size": BATCH, "callbacks": [hooks], "verbose": 0}
        model.fit(x, y, epochs=2, validation_data=validation, **options)
        model.evaluate(x, y, **options)
        model.predict(x, **options)
        return [call[0] for call in calls], calls

    lab.same(dense, action)


@case("callbacks")
def backup_and_restore(lab):
    """`BackupAndRestore` resumes an interrupted fit where it was."""
    x, y, _ = data()

    def build_and_run(strategy, folder):
        first = lab.run(dense, [], strategy)[0]
        options = {"batch_size": BATCH, "epochs": 4, "verbose": 0, "shuffle": False}
        backup = lambda: keras.callbacks.BackupAndRestore(folder)  # noqa: E731
        # At the last batch of the second epoch, which is not backed up.
        with contextlib.suppress(InterruptionError):
            first.fit(x, y, callbacks=[interrupting_after(6), backup()], **options)
        resume = [lambda model: model.fit(x, y, callbacks=[backup()], **options)]
        return lab.run(dense, resume, strategy)[1]

    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as two:
        expected = build_and_run(None, str(Path(one) / "backup"))
        actual = build_and_run(lab.strategy(), str(Path(two) / "backup"))
    lab.equal([1, 2, 3], expected.results[0]["epoch"])
    lab.equal(expected.parts(True), actual.parts(True))


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
