"""A `keras.distribution.LayoutMap` over several workers: replicas of several devices."""

from tests.conformance.actions import fit, predict
from tests.conformance.cases_sharding import even, part, parts
from tests.conformance.compare import ADAPTIVE
from tests.conformance.lab import optimizer_values
from tests.conformance.lazy import kd, keras
from tests.conformance.models import regression
from tests.conformance.registry import case
from tests.multiprocess.loops import same_loop


def _layouts(lab, per_replica):
    """The batch is divided over the workers, weights over the devices of each."""
    count = lab.replicas
    shape = count // per_replica, per_replica
    names = [f"cpu:{number}" for number in range(count)]
    mesh = keras.distribution.DeviceMesh(shape, ("batch", "model"), names)
    layouts = keras.distribution.LayoutMap(mesh)
    layouts[".*up/kernel"] = (None, "model")
    layouts[".*up/bias"] = ("model",)
    layouts[".*down/kernel"] = ("model", "batch" if _divides_all(lab) else None)
    return layouts


def _divides_all(lab):
    return 4 % lab.job.num_workers == 0


@case("workers", backends=("jax",))
def as_one_device(lab):
    """`fit`, `predict`, files and backups by a LayoutMap over the devices of all workers."""
    each = lab.replicas // lab.job.num_workers
    x, y = regression(9, outputs=4)
    strategy = lab.strategy(sharding=_layouts(lab, each))
    lab.equal(lab.job.num_workers, strategy.num_replicas_in_sync)
    actions = fit(x, y, batch_size=4, epochs=2), predict(x)
    model = lab.same(even, *actions, strategy=strategy, tolerance=ADAPTIVE, plain_key="by a map")
    sharded = 1 / lab.replicas if _divides_all(lab) else 1 / each
    lab.equal([1 / each, 1 / each, sharded, 1.0, 1.0, 1.0], [part(one) for one in model.weights])
    slots = [part(one) for one in model.optimizer.variables if tuple(one.shape)]
    lab.equal([1 / each] * 4 + [sharded] * 2 + [1.0] * 6, slots)
    lab.alike(model.get_weights())
    with lab.folder() as folder:
        model.save(folder / "m.keras")
        whole = keras.models.load_model(folder / "m.keras")
        lab.equal(model.get_weights(), whole.get_weights())
        lab.equal(optimizer_values(model), optimizer_values(whole))
        model.fit(x, y, batch_size=4, verbose=0, callbacks=[kd.callbacks.BackupAndRestore(folder)])
        lab.everyone("loaded")


@case("workers", backends=("jax",))
def custom_loop(lab):
    """`strategy.run` by a LayoutMap over the devices of all workers, beside one device."""
    each = lab.replicas // lab.job.num_workers
    batches = [regression(8, outputs=4, seed=seed) for seed in range(3)]
    strategy = lab.strategy(sharding=_layouts(lab, each))
    model = same_loop(lab, even, batches, strategy, tolerance=ADAPTIVE)
    lab.check(each == 1 or 1 / each in parts(model.weights), f"whole: {parts(model.weights)}")


@case("workers", backends=("jax",))
def one_component_a_replica(lab):
    """A value has a component for each replica of a worker, not for each device."""
    each = lab.replicas // lab.job.num_workers
    strategy = lab.strategy(sharding=_layouts(lab, each))
    with strategy.scope():
        variable = keras.Variable([1.0, 2.0])

    def step():
        here = kd.get_replica_context()
        return here.replica_id_in_sync_group, here.all_reduce("SUM", variable.value)

    number, total = strategy.run(step)
    both = variable.value * lab.job.num_workers
    lab.equal([lab.job.rank], [int(one) for one in strategy.local_results(number)])
    equal = strategy.extended.reduce_to("SUM", total, variable)
    for value, expected in ((total, both), (equal, both * lab.job.num_workers)):
        components = strategy.local_results(value)
        lab.equal(1, len(components))
        lab.equal(expected, components[0])
    told = strategy.extended.broadcast_to(keras.ops.ones(3), variable)
    lab.equal(1, len(strategy.local_results(told)))
    new = strategy.extended.update(
        variable, lambda one, x: (x * 2.0, one.assign(x)), args=(equal,), group=False
    )
    lab.equal([(2, 2)], [tuple(map(len, one)) for one in map(tuple, new)])
    lab.equal(expected, variable.value)


@case("workers", backends=("jax",))
def refused(lab):
    """A replica over two workers, devices in another order, and maps that differ by worker."""
    each = lab.replicas // lab.job.num_workers
    with lab.raises(
        kd.errors.UnsupportedError, r"worker \d/.*all devices of its replicas.*Received: devices="
    ):
        lab.strategy(sharding=_layouts(lab, lab.replicas))
    names = [f"cpu:{number}" for number in reversed(range(lab.replicas))]
    mesh = keras.distribution.DeviceMesh((lab.replicas // each, each), ("batch", "model"), names)
    with lab.raises(kd.errors.DeviceError, "workers in their order.*Received: sharding=LayoutMap"):
        lab.strategy(sharding=keras.distribution.LayoutMap(mesh))
    layouts = _layouts(lab, each)
    layouts[f".*of {lab.job.rank}"] = ("model",)
    said = r"same options of the strategy. Received: sharding=.*LayoutMap.*of \d.* on worker"
    with lab.raises(kd.errors.DisagreementError, said):
        lab.strategy(sharding=layouts)
