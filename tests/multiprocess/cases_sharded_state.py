"""State that the replicas of several workers divide (`sharding=`). On layouts such as 2x1-full."""

import dataclasses
import math
import re

import h5py
import numpy as np

from tests.conformance.actions import fit
from tests.conformance.cases_sharding import even, parts, parts_of
from tests.conformance.compare import ADAPTIVE
from tests.conformance.lab import optimizer_values, values
from tests.conformance.lazy import kd, keras
from tests.conformance.models import regression, stack
from tests.conformance.registry import case
from tests.environment import everything
from tests.multiprocess.loops import squared_error_step

BATCH = 8
# Of the custom loop with reads between its steps, whose numbers once depended on chance.
REPETITIONS = 40 if everything() else 20


BACKENDS = ("jax", "torch")


def divides_weights(lab):
    return lab.strategy().replica_set.options.sharding.divides_weights


def _held(variables):
    if keras.backend.backend() == "torch":
        return sum(one._value.nbytes for one in variables)
    return sum(one._value.addressable_data(0).nbytes for one in variables)


def _own_parts(lab, variables):
    return parts_of(variables, lab.shards, lab.number_of_shard)


def _with_slots(lab):
    with lab.strategy().scope():
        model = even()
        model.optimizer.build(model.trainable_variables)
    return model


def own_size(lab, variables):
    """How many elements of variables a device of this worker holds."""
    return sum(math.prod(one.shape) * _own_parts(lab, [one]).pop() for one in variables)


@case("workers", backends=BACKENDS)
def each_holds_its_part(lab):
    """From the first moment on each device holds its part, as ZeRO's formula says."""
    model = _with_slots(lab)
    x, y = regression(9, outputs=4)

    def check():
        full = divides_weights(lab)
        of_weights = _own_parts(lab, model.weights) if full else {1.0}
        lab.equal(of_weights, parts(model.weights))
        lab.equal(_own_parts(lab, model.optimizer.variables), parts(model.optimizer.variables))
        own = own_size(lab, model.weights)
        lab.equal(4 * (own if full else model.count_params()), _held(model.weights))
        slots = [one for one in model.optimizer.variables if one.shape]
        lab.equal(8 * own, _held(slots))
        rows = kd.describe_layout(model).rows
        told = {path: held for path, *_, held in rows}
        lab.equal(_held(model.weights), sum(told[one.path] for one in model.weights))
        lab.equal(8 * own, sum(told[one.path] for one in slots))

    check()
    model.fit(x, y, batch_size=4, verbose=0)
    check()
    model.set_weights([array + 1 for array in model.get_weights()])
    check()


@case("workers", backends=BACKENDS, seconds=600)
def loop_with_reads(lab):
    """A custom loop that reads variables between its steps has one device's numbers, each time."""
    x, y = regression(4 * BATCH, outputs=4)
    batches = [(x[i : i + BATCH], y[i : i + BATCH]) for i in range(0, len(x), BATCH)]

    def train(model, strategy, times):
        variables = [*model.variables, *model.optimizer.variables]
        step = squared_error_step(model, BATCH)
        compiled = kd.function(lambda data: strategy.run(step, args=(data,)))
        start = values(variables)
        found = []
        for repetition in range(times):
            for variable, value in zip(variables, start, strict=True):
                variable.assign(value)
            seen = []
            for batch in strategy.distribute_dataset(batches):
                loss = strategy.reduce("SUM", compiled(batch), axis=None)
                read = values(variables[repetition % len(variables) :])
                seen = [float(keras.ops.convert_to_numpy(loss)), *read]
            found.append([seen[0], *values(variables)])
        return found

    def build():
        model = even()
        model.optimizer.build(model.trainable_variables)
        return model

    plain = kd.get_strategy()
    _, expected = lab.run(build, [lambda model: train(model, plain, 1)])
    strategy = lab.strategy()
    _, actual = lab.run(build, [lambda model: train(model, strategy, REPETITIONS)], strategy)
    [[first]], [found] = expected.results, actual.results
    for one in found:
        lab.equal(first, one)
        for part, of_first in zip(one, found[0], strict=True):
            lab.check(np.array_equal(part, of_first), f"{part} instead of {of_first}")


@case("workers", backends=BACKENDS)
def saved_and_loaded(lab):
    """A file is as of one device; it is loaded with and without `sharding=`, and back."""
    x, y = regression(9, outputs=4)
    model = lab.made(even)
    model.fit(x, y, batch_size=4, verbose=0)
    weights, state = model.get_weights(), optimizer_values(model)
    with lab.folder() as folder:
        model.save(folder / "m.keras")
        whole = keras.models.load_model(folder / "m.keras")
        again = lab.made(lambda: keras.models.load_model(folder / "m.keras"))
        for one in (whole, again):
            lab.equal(weights, one.get_weights())
            lab.equal(state, optimizer_values(one))
        lab.equal(parts(model.weights), parts(again.weights))
        model.save_weights(folder / "m.weights.h5")
        again.set_weights([array + 1 for array in weights])
        again.load_weights(folder / "m.weights.h5")
        lab.equal(weights, again.get_weights())
        lab.everyone("loaded")
    lab.check("path=" in repr(model.weights[0]), repr(model.weights[0]))
    lab.alike(again.fit(x, y, batch_size=4, verbose=0).history)


@case("workers", backends=BACKENDS)
def small_variables_stay_whole(lab):
    """`min_size` of `Sharding`: a smaller variable is whole on each device."""
    own = lab.strategy().replica_set.options.sharding
    for state in ("full", "auto"):
        sharding = dataclasses.replace(own, state=state, min_size=9)
        layers = [keras.layers.Dense(8), keras.layers.Dense(4)]
        model = lab.made(lambda layers=layers: stack(layers), sharding=sharding)
        up, up_bias, down, down_bias = model.weights
        lab.equal(_own_parts(lab, [up, down]), parts([up, down]))
        lab.equal({1.0}, parts([up_bias, down_bias]))
    trained = fit(*regression(8, outputs=4), batch_size=4)
    lab.same(even, trained, strategy=lab.strategy(sharding=sharding), tolerance=ADAPTIVE)
    why = {path.rpartition("/")[2]: why for path, *_, why, _ in kd.describe_layout(model).rows}
    lab.equal("fewer than 9 elements", why["bias"])
    divided = {"jax": "largest dimension that", "torch": "PyTorch divides any shape"}[lab.backend]
    lab.check(divided in why["kernel"], why["kernel"])


@case("workers", backends=BACKENDS)
def drawn_as_on_one_device(lab):
    """Initial values are one device's; where seeds differ by worker, those of the chief."""

    def drawn(seed):
        keras.utils.set_random_seed(seed)
        drawing = ["glorot_uniform", "orthogonal", keras.initializers.Constant(0.5)]
        return [keras.Variable(one, shape=(8, 8), dtype="float32", name="w") for one in drawing]

    expected = values(drawn(5))
    for seed in (5, 5 + lab.job.rank):
        made = lab.made(lambda seed=seed: drawn(seed))
        lab.strategy().run(lambda: None)  # before the first step whole variables may differ
        lab.equal(expected, values(made))
        lab.equal(_own_parts(lab, made) if divides_weights(lab) else {1.0}, parts(made))


@case("workers", backends=BACKENDS)
def assigned_before_it_is_drawn(lab):
    """A new variable keeps what is assigned to it; the others have one device's initial values."""

    def drawn():
        keras.utils.set_random_seed(7)
        draws = keras.random.SeedGenerator(3)
        seeds = [None, draws, None, draws]
        drawing = [keras.initializers.RandomNormal(seed=seed) for seed in seeds]
        drawing.append(lambda shape, dtype: keras.random.uniform(shape, dtype=dtype, seed=draws))
        return [keras.Variable(one, shape=(8, 6), dtype="float32", name="w") for one in drawing]

    given = np.arange(48, dtype="float64").reshape(6, 8).T  # of another type, not in C's order
    expected = [given.astype("float32"), *values(drawn())[1:]]
    made = lab.made(drawn)
    made[0].assign(given)
    lab.equal(expected, values(made))
    made[0].assign(given + 1)
    lab.equal([expected[0] + 1, *expected[1:]], values(made))


@case("workers", backends=BACKENDS)
def files_that_do_not_fit(lab):
    """A file that lacks a variable, or has another shape of it: both are named, nothing changes."""
    model = lab.made(even)
    with lab.folder() as folder:
        own = folder / f"{lab.job.rank}.weights.h5"
        index, shard = own.with_suffix(".json"), own.with_name(f"{lab.job.rank}_00000.weights.h5")
        plain = even()
        plain.save_weights(own)
        plain.save_weights(index, max_shard_size=1)
        kernel, kept = model.layers[-1].kernel, values(model.weights)
        lacks = f"'{kernel.path}', whose layer lacks weights in "
        for changed, said in (
            ((3, 3), f"'{kernel.path}' of shape {tuple(kernel.shape)}, which is (3, 3) in "),
            (None, lacks),
        ):
            for path, file in ((own, own), (index, shard)):
                with h5py.File(file, "a") as opened:
                    stored = list(opened["layers"].values())[-1]["vars"]
                    del stored["0"]
                    if changed is not None:
                        stored["0"] = np.zeros(changed)
                named = path if changed is None else file
                with lab.raises(
                    ValueError, re.escape(f"{said}'{named}'") + ".*No weight has changed"
                ):
                    model.load_weights(path)
                lab.equal(kept, values(model.weights))
        lab.everyone("loaded")


@case("workers", backends=BACKENDS)
def written_on_all_alike(lab):
    """Workers that assign other values to a sharded variable are refused, and go on."""
    model = _with_slots(lab)
    slot = next(one for one in model.optimizer.variables if one.shape)
    before = values([slot])
    with lab.raises(kd.errors.DisagreementError, "assign the same value.*Received: values that"):
        slot.assign(np.full(slot.shape, lab.job.rank))
    lab.equal(before, values([slot]))
    lab.still_usable(lab.strategy())


@case("workers", backends=("jax",))
def after_an_error(lab):
    """A step that raises, and a callback that does, leave the state as it was."""
    x, y = regression(12, outputs=4)
    model = lab.made(even)
    model.fit(x, y, batch_size=4, verbose=0)
    before = values([*model.variables, *model.optimizer.variables])

    @kd.function
    def failing():
        model.weights[0].assign_add(keras.ops.ones(model.weights[0].shape))
        raise RuntimeError("a mistake")

    with lab.raises(RuntimeError, "a mistake"):
        lab.strategy().run(failing)
    lab.equal(before, values([*model.variables, *model.optimizer.variables]))

    def strike(batch, logs):
        raise RuntimeError(f"at batch {batch}")

    callback = keras.callbacks.LambdaCallback(on_train_batch_end=strike)
    with lab.raises(RuntimeError, "at batch 0"):
        model.fit(x, y, batch_size=4, verbose=0, callbacks=[callback])
    lab.alike([array.tolist() for array in values(model.variables)])
    lab.alike(model.fit(x, y, batch_size=4, verbose=0).history)
    lab.equal(_own_parts(lab, model.optimizer.variables), parts(model.optimizer.variables))


@case("workers", backends=BACKENDS, like="sharded_state.written_on_all_alike")
def callbacks_of_the_chief_alone(lab):
    """Callbacks that read variables on the chief alone are refused, and say what to use."""
    x, y = regression(8, outputs=4)
    model = lab.made(even)
    with lab.folder() as folder:
        for refused in (
            keras.callbacks.BackupAndRestore(str(folder / "backups")),
            keras.callbacks.TensorBoard(str(folder / "logs"), histogram_freq=1),
        ):
            with lab.raises(kd.errors.UnsupportedError, "on the chief alone.*Received: .*Use "):
                model.fit(x, y, verbose=0, callbacks=[refused])
        model.fit(x, y, verbose=0, callbacks=[keras.callbacks.TensorBoard(str(folder / "logs"))])
