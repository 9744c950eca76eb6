"""State that the replicas of several workers divide (`sharding=`)."""

from tests.conformance.actions import fit, predict
from tests.conformance.cases_sharding import even, part
from tests.conformance.compare import ADAPTIVE
from tests.conformance.lab import fresh
from tests.conformance.lazy import kd, keras
from tests.conformance.models import regression
from tests.conformance.registry import case
from tests.multiprocess.loops import squared_error_step

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
        with lab.raises(kd.errors.UnsupportedError, "Use kerasdist.callbacks.BackupAndRestore"):
            trained(1, keras.callbacks.BackupAndRestore(folder / "keras"))
        lab.everyone("read")


@case("workers", backends=BACKENDS)
def divided_slots_in_a_custom_loop(lab):
    """A custom loop with divided slots, clipping and accumulation: numbers of whole slots."""
    x, y = regression(12, outputs=4)
    found = []
    for strategy in (lab.strategy(), divided(lab)):
        fresh()
        with strategy.scope():
            model = even()
            optimizer = keras.optimizers.Adam(
                0.01, global_clipnorm=0.1, gradient_accumulation_steps=2, use_ema=True
            )

        step = squared_error_step(model, 4, optimizer)
        run = kd.function(lambda batch, run=strategy.run, step=step: run(step, args=(batch,)))
        batches = [(x[i : i + 4], y[i : i + 4]) for i in (0, 4, 8)]
        for _ in range(2):
            for batch in strategy.distribute_dataset(batches):
                run(batch)
        found.append(([one.numpy() for one in optimizer.variables], model.get_weights()))
    whole, own = found
    lab.equal(whole, own, tolerance=ADAPTIVE)
    held = [part(one) for one in optimizer.variables if tuple(one.shape)]
    lab.equal({1 / lab.replicas, 1.0}, set(held))  # gradients are accumulated whole, to be clipped
    # The first step of `fit` on one device reads whole slots.
    lab.equal((), kd.compare_with_one_device(model, x[:4], y[:4]).more_than_rounding)
