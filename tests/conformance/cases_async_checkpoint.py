"""`kd.callbacks.ModelCheckpoint(save="async")`: the files of a save that training waits for."""

import contextlib
import threading
import time
import zipfile
from unittest import mock

from kerasdist.core import whole_files
from tests.conformance.interruptions import arrays, exact
from tests.conformance.lazy import kd, keras
from tests.conformance.models import compiled, dense, regression
from tests.conformance.registry import case

N, BATCH = 22, 4


def fit(model, callbacks, epochs=2, **options):
    x, y = regression(N)
    options = {"batch_size": BATCH, "epochs": epochs, "verbose": 0, **options}
    return model.fit(x, y, callbacks=callbacks, **options)


class Disk:
    """Lets no thread write a file before `goes_on` is set; notes which begin, how many at once."""

    def __init__(self):
        self.goes_on = threading.Event()
        self.names = []
        self.at_once = self._writing = 0
        self._replacing = whole_files.replacing

    @contextlib.contextmanager
    def __call__(self, path):
        with self._replacing(path) as name:
            if threading.current_thread() is not threading.main_thread():
                self._writing += 1
                self.at_once = max(self.at_once, self._writing)
                self.names.append(str(path).rpartition("/")[2])
                if not self.goes_on.wait(60):
                    raise TimeoutError("training does not go on while the disk works")
                self._writing -= 1
            yield name

    def after(self, epoch, batch):
        """A callback that lets the disk go on, after a batch of an epoch."""
        now = {}

        def maybe(index, logs):
            if (now["epoch"], index) == (epoch, batch):
                self.goes_on.set()

        return keras.callbacks.LambdaCallback(
            on_epoch_begin=lambda index, logs: now.update(epoch=index), on_train_batch_end=maybe
        )


@contextlib.contextmanager
def disk():
    made = Disk()
    with mock.patch.object(whole_files, "replacing", made):
        yield made


def twins(folder, name, **options):
    """Two checkpoints of the same moments: one in the background, and Keras's own."""
    return [
        kd.callbacks.ModelCheckpoint(folder / f"async-{name}", save="async", **options),
        keras.callbacks.ModelCheckpoint(folder / f"sync-{name}", **options),
    ]


def content(path):
    if path.suffix != ".keras":
        return path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        names = [name for name in archive.namelist() if name != "metadata.json"]
        return {name: archive.read(name) for name in names}


def require_equal_twins(lab, folder, count):
    found = sorted(folder.glob("async-*"))
    lab.equal(len(found), count)
    for path in found:
        twin = path.with_name(path.name.replace("async-", "sync-"))
        lab.check(content(path) == content(twin), f"{path.name} differs from {twin.name}")
    lab.check(not list(folder.glob("unfinished*")), "an unfinished file is left")


def with_averages():
    """A model with a step and state of its own, moving averages, and a layer in half precision."""

    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.words = keras.layers.StringLookup()
            self.words.set_vocabulary(["a", "b"])
            self.steps = self.add_weight(shape=(), initializer="zeros", trainable=False)
            self.normal = keras.layers.BatchNormalization()
            self.drop = keras.layers.Dropout(0.3)
            self.narrow = keras.layers.Dense(2, dtype="bfloat16")
            self.out = keras.layers.Dense(1)

        def call(self, x, training=False):
            if training:
                self.steps.assign(self.steps + 1)
            x = self.drop(self.normal(x, training=training), training=training)
            return self.out(keras.ops.cast(self.narrow(x), "float32"))

        def train_step(self, *arguments):
            return super().train_step(*arguments)

    model = Own()
    model.build((None, 4))
    optimizer = keras.optimizers.Adam(0.02, use_ema=True, ema_momentum=0.9)
    return compiled(model, optimizer, "mse", metrics=["mae"])


@case("callbacks")
def same_bytes(lab):
    """`ModelCheckpoint(save="async")`: byte by byte the files of Keras's, under a strategy."""
    change = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: change.model.set_weights(
            [array * 0.5 for array in change.model.get_weights()]
        )
    )
    model = lab.made(with_averages)
    with lab.folder() as folder, disk() as slow:
        listed = twins(folder, "{epoch}.keras")
        listed += twins(folder, "{epoch}.weights.h5", save_weights_only=True)
        fit(model, [*listed, change, slow.after(1, 2)])
        require_equal_twins(lab, folder, 4)


@case("callbacks", like="async_checkpoint.checkpoints_and_backups")
def faster_than_the_disk(lab):
    """A save after each batch, and a disk that takes longer: all files, in order, one at a time."""
    model = lab.made(lambda: dense("adam"))
    name = "{epoch}-{batch:02d}.weights.h5"
    with lab.folder() as folder, disk() as slow:
        slow.goes_on = mock.Mock(wait=lambda seconds: time.sleep(0.05) or True)
        for _ in range(2):  # two calls of fit with the same callbacks
            listed = twins(folder, name, save_weights_only=True, save_freq=1)
            fit(model, listed)
            require_equal_twins(lab, folder, 12)
        names = [name.format(epoch=epoch, batch=batch) for epoch in (1, 2) for batch in range(1, 7)]
        lab.equal(slow.names, [f"async-{one}" for one in names] * 2)
        lab.equal(slow.at_once, 1)


@case("callbacks", like="async_checkpoint.same_bytes")
def failing_disk(lab):
    """A file that cannot be written: `fit` raises it after a batch, once; the old one stays."""
    model = lab.made(lambda: dense("adam"))
    with lab.folder() as folder:
        path = folder / "m.weights.h5"
        checkpoint = kd.callbacks.ModelCheckpoint(path, save_weights_only=True, save="async")
        fit(model, [checkpoint])
        before, seen = path.read_bytes(), []

        def full(descriptor):
            raise OSError(28, "No space left on device")

        def wait(batch, logs):
            seen.append(batch)
            if len(seen) == 7:  # in the second epoch
                slow.goes_on.set()
                while not checkpoint._file._writing.done():
                    time.sleep(0.01)

        listed = [keras.callbacks.LambdaCallback(on_train_batch_end=wait), checkpoint]
        no_space = mock.patch.object(whole_files.os, "fsync", full)
        with disk() as slow, no_space, lab.raises(OSError, "No space"):
            fit(model, listed)
        lab.equal(len(seen), 7)
        lab.check(path.read_bytes() == before, "the file before it is lost")
        lab.equal([one.name for one in folder.iterdir()], [path.name])
        with no_space, lab.raises(OSError, "No space"):
            fit(model, [checkpoint], epochs=1)  # at the end of training
        fit(model, [checkpoint], epochs=1)
        lab.check(path.read_bytes() != before, "no file is written after an error")


@case("callbacks", like="async_checkpoint.same_bytes")
def interrupted(lab):
    """`fit` ends with an error, or by Ctrl-C, when the file that it was writing is there."""
    model = lab.made(lambda: dense("adam"))
    for error in (RuntimeError, KeyboardInterrupt):
        with lab.folder() as folder, disk() as slow:

            def strike(epoch, logs, error=error, slow=slow):
                if epoch:
                    threading.Timer(0.2, slow.goes_on.set).start()
                    raise error

            striking = keras.callbacks.LambdaCallback(on_epoch_begin=strike)
            with contextlib.suppress(error):
                fit(model, [*twins(folder, "m.keras"), striking])
                lab.check(False, "not interrupted")
            require_equal_twins(lab, folder, 1)


@case("callbacks", like="async_checkpoint.checkpoints_and_backups")
def refused_checkpoints(lab):
    """What `save="async"` cannot do, it says."""
    with lab.raises(ValueError, "'sync' or 'async'. Received: save='later'"):
        kd.callbacks.ModelCheckpoint("m.keras", save="later")
    with lab.raises(ValueError, r"\.keras or \.weights\.h5\. Received: filepath='m.h5'"):
        kd.callbacks.ModelCheckpoint("m.h5", save="async")

    class Own(keras.Sequential):
        def save(self, *args, **kwargs):
            super().save(*args, **kwargs)

    with lab.strategy().scope():
        model = Own([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    with lab.folder() as folder:
        path = folder / "m.keras"
        with lab.raises(ValueError, "keras.Model.save. Received: .* Own, which overrides save"):
            fit(model, [kd.callbacks.ModelCheckpoint(path, save="async")])
        fit(model, [kd.callbacks.ModelCheckpoint(path)])
        lab.equal(keras.models.load_model(path, {"Own": Own}).get_weights(), model.get_weights())


@case("restarts", replicas=(2,))
def checkpoints_and_backups(lab):
    """A backup waits for the files of `ModelCheckpoint`: a restart would not write them."""

    def listed(folder):
        options = {"save_best_only": True, "save_weights_only": True, "save": "async"}
        return [kd.callbacks.ModelCheckpoint(folder / "w.weights.h5", "val_loss", **options)]

    exact(lab, arrays(), listed)
    from kerasdist.callbacks.backup.run_files import RunFiles

    written = []
    write = RunFiles.write
    model = lab.made(lambda: dense("adam"))
    with lab.folder() as folder, disk() as slow:

        def noted(*arguments):
            written.append((folder / "1.weights.h5").exists())
            write(*arguments)

        threading.Timer(0.3, slow.goes_on.set).start()
        checkpoint = kd.callbacks.ModelCheckpoint(
            folder / "{epoch}.weights.h5", save_weights_only=True, save="async"
        )
        with mock.patch.object(RunFiles, "write", noted):
            fit(model, [checkpoint, kd.callbacks.BackupAndRestore(folder / "backups")])
    lab.equal(written, [True, True])
