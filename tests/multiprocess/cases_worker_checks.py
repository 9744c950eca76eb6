"""The check of the first batch, and the report of it, where workers hold parts of the batch."""

import logging
from unittest import mock

import numpy as np

from tests.conformance.cases_check import checked, warned
from tests.conformance.lab import MIXES, fresh, values
from tests.conformance.lazy import kd, keras
from tests.conformance.mixing import EXAMPLES, added_sum
from tests.conformance.models import regression, stack
from tests.conformance.registry import case
from tests.conformance.unmixing import network, noisy, residual
from tests.environment import everything
from tests.facade.sources import Sequence

CHECKED = ("tensorflow", "torch")


def made(lab, build, **options):
    fresh()
    with lab.strategy(**options).scope():
        return build(lab.backend)


def in_steps(model):
    """A graph of each of many models would take longest."""
    model.run_eagerly = True
    return model


def some(lab):
    """The examples: in a run of the tests every second one, where each is traced."""
    return EXAMPLES if everything() or lab.backend == "torch" else EXAMPLES[::2]


@case("the first-batch check", backends=CHECKED)
def found(lab):
    """The five public examples that mix examples: found on workers, the chief warns, once."""
    for build in some(lab):
        model, batch = made(lab, lambda backend: build(backend, repaired=False))  # noqa: B023
        said = warned(in_steps(model), batch)
        name = build.__name__
        lab.equal(len(said), 1 if lab.job.is_chief else 0)
        if lab.job.is_chief:
            lab.check("mixing.py" in said[0] or "steps_" in said[0], f"no place: {said}")
            lab.check("12 examples" in said[0] or "11 examples" in said[0], f"{name}: {said}")
        lab.alike([array.tolist() for array in values(model.variables)])


@case("the first-batch check", backends=CHECKED)
def silent(lab):
    """Nothing is said on workers of the repaired examples, and of models that mix nothing."""

    def batch_norm(backend):
        return network(keras.layers.BatchNormalization()), regression(11)

    builds = {one.__name__: lambda b, one=one: one(b, repaired=True) for one in some(lab)}
    builds["norm and dropout"] = lambda _: (residual(), regression(11))
    builds["batch normalization"] = batch_norm
    builds["draws"] = lambda _: (noisy(), regression(11))
    for name, build in builds.items():
        model, batch = made(lab, build)
        with checked() as checks:
            said = warned(in_steps(model), batch)
        lab.check(not said and checks == ["compared"], f"{name}: {checks} {said}")


@case("the first-batch check")
def report(lab):
    """`kd.compare_with_one_device` gives all workers the same report; other batches are refused."""
    needed = lab.backend != "jax"
    for repaired in (False, True):
        model, batch = made(lab, lambda backend: added_sum(backend, repaired=repaired))  # noqa: B023
        given = kd.compare_with_one_device(model, *batch)
        lab.equal(given.equal, repaired or not needed)
        lab.equal(given.examples, 12)
        lab.alike(str(given))
        lab.check(repaired or not needed or "ActivityRegularization" in given.where, str(given))
    x, y = batch
    moved = np.array(x) + (lab.job.rank == 0)
    with lab.raises(kd.errors.DisagreementError, r"x\.checksum of rows"):
        kd.compare_with_one_device(model, moved, y)


@case("the first-batch check", backends=CHECKED, like="worker_checks.found")
def choices(lab):
    """`check="raise"` raises on every worker, before the step; `"off"` says nothing."""
    model, batch = made(lab, lambda backend: added_sum(backend, repaired=False), check="raise")
    before = values(model.variables)
    with lab.raises(kd.errors.NotOneDeviceError, MIXES):
        model.fit(*batch, batch_size=12, verbose=0)
    lab.check(all(map(np.array_equal, before, values(model.variables))), "a step was taken")
    rows = 48 * lab.replicas  # of which some do
    large = np.ones((rows, 4), "float32"), np.zeros((rows, 1), "float32")
    with lab.raises(kd.errors.NotOneDeviceError, f"For 48 of the {rows} examples of the first"):
        model.fit(*large, batch_size=rows, verbose=0)
    model, batch = made(lab, lambda backend: added_sum(backend, repaired=False), check="off")
    lab.equal(warned(model, batch), [])
    with lab.raises(kd.errors.DisagreementError, "Received: check='"):
        lab.strategy(check="warn" if lab.job.is_chief else "off")


@case("the first-batch check", backends=("torch",))
def large_sharded_state(lab):
    """Workers that divide a large model's state do not make it whole for the comparison."""
    from kerasdist.check import first_batch

    for most, level, expected in (
        (first_batch.MOST_WHOLE, logging.DEBUG, "compared"),
        (1, logging.INFO, "not compared with one device: workers that"),
    ):
        options = {"sharding": kd.Sharding("optimizer", min_size=1)}
        model, batch = made(lab, lambda backend: added_sum(backend, repaired=True), **options)
        with checked(level) as checks, mock.patch.object(first_batch, "MOST_WHOLE", most):
            warned(model, batch)
        lab.check(len(checks) == 1 and expected in checks[0], f"{expected}: {checks}")


@case("the first-batch check", backends=CHECKED)
def own_rows(lab):
    """Workers that read different numbers of rows by themselves are checked together."""
    rank, workers = lab.job.rank, lab.job.num_workers
    x, y = regression(3 * workers + 1)
    begins = [0, *(3 * one + 1 for one in range(1, workers + 1))]
    mine = slice(begins[rank], begins[rank + 1])

    options = kd.InputOptions(auto_shard_policy=kd.AutoShardPolicy.OFF)
    for repaired in (False, True):
        model, _ = made(lab, lambda backend: added_sum(backend, repaired=repaired))  # noqa: B023
        own = Sequence([(x[mine], y[mine])])
        data = lab.strategy().distribute_dataset(own, options)
        with checked() as checks:
            said = warned(in_steps(model), (data,))
        expected = [] if repaired or not lab.job.is_chief else 1
        lab.check(bool(said) == bool(expected), f"{repaired}: {said} {checks}")
        lab.check(not repaired or checks == ["compared"], f"{checks}")
        if said:
            lab.check(f"of {len(x)} examples" in said[0], said[0])

    def of_any_length(_):
        mean = keras.layers.Lambda(lambda x: keras.ops.mean(x, axis=1))
        layers = [keras.layers.Embedding(2, 3), mean, keras.layers.Dense(1)]
        return stack(layers, "sgd", inputs=keras.Input((None,), dtype="int32"))

    model = in_steps(made(lab, of_any_length))
    other_shapes = Sequence([(np.ones((3, 2 + rank), "int32"), y[:3])])
    with checked() as checks:
        model.fit(lab.strategy().distribute_dataset(other_shapes, options), verbose=0)
    lab.check(len(checks) == 1 and "not checked: ShapeError" in checks[0], f"{checks}")


@case("the first-batch check", backends=CHECKED)
def error_on_one(lab):
    """What fails on one worker alone while it tries the step leaves no other one waiting."""
    rows = 8 * lab.replicas - 1  # of an uneven batch one device takes all

    def loss(y_true, y_pred):
        if lab.is_last and y_true.shape[0] == rows:
            raise MemoryError("too large for one device")
        return keras.ops.mean(keras.ops.square(y_true - y_pred), axis=-1)

    model = in_steps(made(lab, lambda _: network(loss=loss)))
    x, y = regression(rows)
    with checked() as checks:
        history = model.fit(x, y, batch_size=len(x), epochs=2, verbose=0)
    lab.check(len(checks) == 1 and "too large" in checks[0], f"{checks}")
    lab.alike(history.history)
    told = rf"on worker {lab.job.num_workers - 1}: MemoryError"
    error, said = lab.pick((MemoryError, "too large"), (kd.errors.ReplicaError, told))
    with lab.raises(error, said):
        kd.compare_with_one_device(model, x, y)
