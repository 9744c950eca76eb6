"""State that the replicas of several workers divide (`sharding=`)."""

import numpy as np

from tests.conformance.actions import fit, predict
from tests.conformance.cases_sharding import even, part
from tests.conformance.compare import ADAPTIVE
from tests.conformance.lazy import kd, keras
from tests.conformance.models import regression
from tests.conformance.registry import case

BACKENDS = ("tensorflow",)


def divided(lab, state="optimizer"):
    return lab.strategy(sharding=kd.Sharding(state, min_size=1))


def slots(model):
    return [one for one in model.optimizer.variables if tuple(one.shape)]


@case("workers", backends=BACKENDS)
def slots_divided_over_workers(lab):
    """`sharding="optimizer"` over workers: numbers, files and slots are those of one device."""
    x, y = regression(9, outputs=4)
    actions = fit(x, y, batch_size=4, epochs=2), predict(x)
    model = lab.same(even, *actions, strategy=divided(lab), tolerance=ADAPTIVE)
    lab.equal({1 / lab.replicas}, {part(one) for one in slots(model)})
    with lab.raises(kd.errors.UnsupportedError, "Expected sharding to be None or 'optimizer'"):
        divided(lab, "full")


@case("workers", backends=BACKENDS)
def divided_slots_in_callbacks(lab):
    """Checkpoints and backups of divided slots, whole files that the chief writes."""
    x, y = regression(12, outputs=4)

    def trained(epochs, *callbacks):
        keras.utils.set_random_seed(3)
        with divided(lab).scope():
            model = even()
        model.fit(x, y, batch_size=4, epochs=epochs, verbose=0, callbacks=list(callbacks))
        return model

    with lab.folder() as folder:
        whole = trained(2)
        expected = [one.numpy() for one in whole.optimizer.variables]
        checkpoint = keras.callbacks.ModelCheckpoint(folder / "m.keras")
        backup = kd.callbacks.BackupAndRestore(folder / "backup", delete_checkpoint=False)
        trained(1, checkpoint, backup)
        loaded = keras.models.load_model(folder / "m.keras")
        restored = trained(2, kd.callbacks.BackupAndRestore(folder / "backup"))
        own = [one.numpy() for one in restored.optimizer.variables]
        lab.equal(expected, own)
        lab.equal(whole.get_weights(), restored.get_weights())
        with divided(lab).scope():
            again = keras.models.load_model(folder / "m.keras")
        kept = [one.numpy() for one in loaded.optimizer.variables]
        lab.equal(kept, [one.numpy() for one in again.optimizer.variables])
        lab.equal({1 / lab.replicas}, {part(one) for one in slots(again)})
        with lab.raises(kd.errors.UnsupportedError, "Expected kerasdist.callbacks.BackupAndRest"):
            trained(1, keras.callbacks.BackupAndRestore(folder / "keras"))
        lab.everyone("read")


@case("workers", backends=BACKENDS)
def slots_that_the_chief_assigns(lab):
    """What the chief alone assigns to divided slots, `BroadcastGlobalVariables` sends to all."""
    x, y = regression(12, outputs=4)
    with divided(lab).scope():
        model = even()
    model.fit(x, y, batch_size=4, verbose=0)
    values = [np.full(one.shape, number, "float32") for number, one in enumerate(slots(model))]
    if lab.job.is_chief:
        for one, value in zip(slots(model), values, strict=True):
            one.assign(value)
    found = []
    read = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: found.extend(one.numpy() for one in slots(model))
    )
    model.fit(
        x, y, batch_size=4, verbose=0, callbacks=[kd.callbacks.BroadcastGlobalVariables(), read]
    )
    lab.equal(values, found)
