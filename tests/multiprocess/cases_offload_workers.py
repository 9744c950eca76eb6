"""`offload="optimizer"` on several workers: also with shards, files, backups and a custom loop."""

from tests.conformance.actions import fit, predict
from tests.conformance.cases_offload import is_on_host, of_all_sizes, where
from tests.conformance.cases_sharding import even
from tests.conformance.compare import ADAPTIVE
from tests.conformance.lab import optimizer_values, values
from tests.conformance.lazy import kd, keras
from tests.conformance.models import regression
from tests.conformance.registry import case
from tests.multiprocess.loops import same_loop

BACKENDS = ("jax", "torch")


@case("workers", backends=BACKENDS)
def as_one_device(lab):
    """Numbers, files and a restart are those of one device; only the hosts hold slots."""
    x, y = regression(9, outputs=4)
    with of_all_sizes(), lab.folder() as folder:
        strategy = lab.strategy(offload="optimizer")
        actions = fit(x, y, batch_size=4, epochs=2), predict(x)
        model = lab.same(even, *actions, strategy=strategy, tolerance=ADAPTIVE, plain_key="slots")
        lab.equal(({True}, {False}), where(model.optimizer.variables))
        lab.equal({False}, {is_on_host(one) for one in model.weights})
        lab.alike([one.tolist() for one in model.get_weights()])
        model.save(folder / "m.keras")
        whole = keras.models.load_model(folder / "m.keras")
        lab.equal(optimizer_values(model), optimizer_values(whole))

        def trained(epochs):
            keras.utils.set_random_seed(3)
            with strategy.scope():
                made = even()
            backup = kd.callbacks.BackupAndRestore(folder / "backup", delete_checkpoint=False)
            made.fit(x, y, batch_size=4, epochs=epochs, verbose=0, callbacks=[backup])
            return [*values(made.weights), *optimizer_values(made)], made

        trained(1)
        again, model = trained(2)
        lab.equal(({True}, {False}), where(model.optimizer.variables))
        with strategy.scope():
            keras.utils.set_random_seed(3)
            at_once = even()
        at_once.fit(x, y, batch_size=4, epochs=2, verbose=0)
        lab.equal([*values(at_once.weights), *optimizer_values(at_once)], again)


@case("workers", backends=BACKENDS)
def custom_loop(lab):
    """Between the steps of a custom loop the hosts hold the optimizer's variables."""
    batches = [regression(8, outputs=4, seed=seed) for seed in range(2)]
    with of_all_sizes():
        strategy = lab.strategy(offload="optimizer")
        model = same_loop(lab, even, batches, strategy, tolerance=ADAPTIVE)
    lab.check(any(map(is_on_host, model.optimizer.variables)), "the device holds all")
