"""What there is only with several workers: an equal start, equal order, values of all workers."""

import contextlib
import io
import os
import random
import sys
import tracemalloc
import warnings
from pathlib import Path
from unittest import mock

import numpy as np

from kerasdist.core import ownership
from tests.conformance.actions import fit, predict
from tests.conformance.cases_training import check_predict_to, two_outputs
from tests.conformance.lab import values
from tests.conformance.lazy import jax, kd, keras, torch
from tests.conformance.models import dense, regression, stack
from tests.conformance.registry import case
from tests.facade.lab import numbered
from tests.multiprocess.loops import same_loop, squared_error_step

PLACEMENT = "kerasdist.backends.jax.mesh.worker_placement"


def _differing_seeds(lab):
    keras.utils.set_random_seed(100 + lab.job.rank)
    random.seed(lab.job.rank)


@case("workers")
def equal_order(lab):
    """Weights start equal, and data are shuffled in the same order, whatever the seeds."""
    _differing_seeds(lab)
    model = lab.made(dense)
    x, y = regression(23)
    model.evaluate(x[:6], y[:6], batch_size=6, verbose=0)
    lab.alike([array.tolist() for array in values(model.weights)])
    _differing_seeds(lab)
    history = model.fit(x, y, batch_size=4, epochs=2, shuffle=True, verbose=0)
    lab.alike(history.history)
    lab.alike([array.tolist() for array in values(model.weights)])


@case("workers")
def dropout_in_a_batch_of_one_row(lab):
    """Weights stay equal, where the workers' generators differ as those of GPUs do."""
    x, y = regression(9)
    layers = keras.layers

    def differ(logs):  # after the workers have made their random states equal
        if lab.backend == "torch":
            torch.manual_seed(lab.job.rank)

    model = lab.made(lambda: stack([layers.Dense(8), layers.Dropout(0.5), layers.Dense(1)]))
    begins = keras.callbacks.LambdaCallback(on_train_begin=differ)
    model.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0, callbacks=[begins])
    lab.alike([array.tolist() for array in values(model.variables)])
    if lab.backend == "torch":
        drawn = lab.everyone(float(torch.rand(())))
        lab.check(len(set(drawn)) == lab.job.num_workers, f"generators of all workers: {drawn}")


@case("workers")
def states_of_the_chief(lab):
    """The chief's random states replace the others', with a warning."""
    x, _ = regression(8)
    model = lab.made(dense)
    keras.utils.set_random_seed(7)
    if lab.job.rank:
        np.random.seed(11)
    with lab.told("seeded alike") as said:
        model.predict(x, batch_size=4, verbose=0)
        keras.utils.set_random_seed(7)
        if lab.job.rank:
            random.seed(3)
        model.predict(x, batch_size=4, verbose=0)
        drawn = [random.random(), float(np.random.random())]
    keras.utils.set_random_seed(7)
    lab.equal([random.random(), float(np.random.random())], drawn)
    lab.check(any("states of numpy on worker" in one for one in said), f"warnings: {said}")


@case("workers")
def draws_of_the_chief_alone(lab):
    """A callback of one worker draws a random number: all go on with arrays in one order."""
    x, y = regression(8)
    model = lab.made(dense)
    keras.utils.set_random_seed(7)
    drawing = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda *_: lab.job.is_chief and random.random()
    )
    with lab.told("seeded alike"):
        model.fit(x, y, batch_size=4, epochs=2, verbose=0, callbacks=[drawing])
    lab.alike([random.random(), float(np.random.random())])


@case("workers")
def equal_results(lab):
    """Every worker has the whole history and all predictions; data come in plain Keras's order."""
    x, y = regression(17)
    shuffled = fit(x, y, batch_size=5, epochs=2), fit(x, y, batch_size=4, shuffle="batch")
    model = lab.same(dense, *shuffled, predict(x, batch_size=4))
    lab.alike([array.tolist() for array in values(model.variables)])


@case("workers", backends=("jax",))
def equal_start_in_few_programs(lab):
    """However large a model is, few programs send it, and no second copy is made."""
    values = np.random.default_rng(lab.job.rank).normal
    compiled, peaks = [], []

    def note(event, *_, **__):
        compiled.extend([event] * event.endswith("backend_compile_duration"))

    def started(count):
        kernels = [values(size=(64, 128)).astype("float32") for _ in range(count)]
        odd = np.float32([-0.0, np.nan, lab.job.rank]), np.zeros((0, 3)), np.array(lab.job.rank > 0)
        # Outside of the scope, in which sharded variables would be compared.
        made = [keras.Variable(one, dtype=one.dtype.name) for one in [*kernels, *odd]]
        made.append(keras.Variable(values(size=5), dtype="bfloat16"))
        compiled.clear()
        tracemalloc.start()
        lab.strategy().replica_set.equalize(made)
        peaks.append(tracemalloc.get_traced_memory()[1] / sum(map(np.size, kernels)) / 4)
        tracemalloc.stop()
        lab.alike([np.asarray(one.value).tobytes() for one in made])
        return len(compiled)

    jax.monitoring.register_event_duration_secs_listener(note)
    chunks = mock.patch(f"{PLACEMENT}._CHUNK", 1 << 13)
    with chunks, mock.patch(f"{PLACEMENT}._BUNDLE", 1 << 16):
        counts = [started(count) for count in (3, 30, 100)]
    jax.monitoring.unregister_event_duration_listener(note)
    lab.check(counts[0] <= 8, f"programs compiled: {counts}")
    # The first model compiled them, but for one of another last size.
    lab.check(max(counts[1:]) <= 2, f"programs compiled: {counts}")
    lab.check(peaks[-1] < 0.3, f"on the host beside the model, by its size: {peaks}")


@case("workers", backends=("jax",))
def predictions_come_by_the_host(lab):
    """No device holds the rows of all others, whether or not replicas have as many."""
    layers = keras.layers
    model = lab.made(lambda: stack([layers.Dense(3), layers.RepeatVector(500)]))
    x, _ = regression(10 * lab.replicas + 3)
    expected = np.repeat((x @ values(model.weights)[0])[:, None], 500, axis=1)
    for size, steps in ((4 * lab.replicas, 1), (4 * lab.replicas - 1, 1), (2 * lab.replicas, 2)):
        largest = []

        def note(batch, logs, size=size, largest=largest):
            arrays = [one for one in jax.live_arrays() if one.shape[1:] == (500, 3)]
            rows = [s.data.shape[0] for one in arrays for s in one.addressable_shards]
            largest.append(max([0, *rows]) / size)

        model.steps_per_execution = steps
        model.predict_function = None
        seen = keras.callbacks.LambdaCallback(on_predict_batch_end=note)
        with mock.patch(f"{PLACEMENT}._CHUNK", 1 << 14):
            found = model.predict(x, batch_size=size, callbacks=[seen], verbose=0)
        lab.equal(found, expected)
        lab.alike(found.tobytes())
        # The whole batch is 1, or steps.
        lab.check(max(largest) < 0.8 * steps, f"rows on one device, by the batch: {largest}")


@case("workers", backends=("jax",))
def a_step_converts_no_variables(lab):
    """What a custom step moves or makes is its batch and result, however many weights.

    Code that reads two variables between the steps costs two reads, and a copy of what it read.
    """
    strategy = lab.strategy()
    x, y = regression(8)
    counted = []

    def counting(owner, name):
        original = getattr(owner, name)

        def call(*args, **kwargs):
            counted.append(name)
            return original(*args, **kwargs)

        return mock.patch.object(owner, name, call)

    def a_step(layers, reads):
        sizes = [4] * layers + [1]
        model = lab.made(lambda: stack([keras.layers.Dense(size) for size in sizes], "sgd"))
        step = squared_error_step(model, 8)
        total = kd.function(lambda data: strategy.run(step, args=(data,)))
        batch = next(iter(strategy.distribute_dataset([(x, y)])))
        for _ in range(2):
            total(batch)
        with contextlib.ExitStack() as patches:
            array = type(jax.numpy.zeros(1))
            patches.enter_context(counting(array, "addressable_data"))
            for name in ("make_array_from_callback", "device_put"):
                patches.enter_context(counting(sys.modules["jax"], name))
            for _ in range(5):
                total(batch)
                if reads:
                    model.layers[0].kernel.numpy(), float(model.optimizer.learning_rate)
        calls = len(counted) / 5
        counted.clear()
        return calls

    few, many, read = a_step(1, False), a_step(20, False), a_step(20, True)
    lab.check(few == many <= 2, f"conversions a step: {few} with few weights, {many} with many")
    lab.check(read <= many + 4, f"conversions a step that reads two variables: {read}")


@case("workers", backends=("jax",))
def eagerly_each_has_its_rows(lab):
    """`run_eagerly=True`: a device holds its replica's rows, where the batch divides evenly."""
    seen = []

    class Seen(keras.layers.Layer):
        def call(self, inputs):
            concrete = not isinstance(inputs, jax.core.Tracer) and isinstance(inputs, jax.Array)
            if concrete and not inputs.is_fully_addressable:
                seen.append((inputs.addressable_shards[0].data.shape[0], inputs.shape[0]))
            return inputs

    def build():
        layers = [keras.layers.Dense(3), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
        return stack([Seen(), *layers], "sgd", metrics=["mae"], run_eagerly=True)

    even = 2 * lab.replicas
    x, y = regression(2 * even + 1)
    model = lab.same(build, fit(x, y, batch_size=even), predict(x, batch_size=even))
    lab.equal({2}, {rows for rows, total in seen if total == even})
    lab.alike([array.tolist() for array in values(model.variables)])


@case("workers")
def chief_alone_prints(lab):
    """The progress bar is the chief's; by default there is a line per epoch, and no bar."""
    model = lab.made(dense)
    x, y = regression(8)
    keras.utils.enable_interactive_logging()
    try:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            model.fit(x, y, batch_size=4, verbose=1)
        with contextlib.redirect_stdout(io.StringIO()) as by_default:
            model.fit(x, y, batch_size=4)
            model.evaluate(x, y, batch_size=4)
            model.predict(x, batch_size=4)
    finally:
        keras.utils.disable_interactive_logging()
    lab.check(("loss" in printed.getvalue()) == lab.job.is_chief, printed.getvalue())
    said = by_default.getvalue()
    lab.equal(said.count("2/2 - "), 3 if lab.job.is_chief else 0)
    lab.check("\b" not in said and "\r" not in said, said)


@case("workers")
def reduce_and_gather(lab):
    """A value holds its own worker's components; sums, gathers, merge calls meet those of all."""
    strategy, replicas = lab.strategy(), lab.replicas
    resolver = strategy.cluster_resolver
    told = resolver.num_workers, resolver.task_id, resolver.task_type, strategy.num_replicas_in_sync
    lab.equal((lab.job.num_workers, lab.job.rank, "worker", replicas), told)
    own = numbered(strategy)
    here = [float(one) for one in strategy.local_results(own)]
    lab.equal(here, [float(one) for one in strategy.local_replicas])
    everywhere = [number for theirs in lab.everyone(here) for number in theirs]
    lab.equal(everywhere, [float(one) for one in range(replicas)])
    made = strategy.run(lambda number: keras.ops.ones((2, 3)) * (number + 1.0), args=(own,))
    numbers = np.arange(1.0, replicas + 1.0, dtype="float32")
    lab.equal(strategy.reduce("SUM", made, axis=None), np.full((2, 3), numbers.sum(), "float32"))
    lab.equal(strategy.reduce("MEAN", made, axis=None), np.full((2, 3), numbers.mean(), "float32"))
    lab.equal(strategy.reduce("SUM", made, axis=0), np.full(3, 2 * numbers.sum(), "float32"))
    expected = np.repeat(numbers, 2)[:, None].repeat(3, axis=1)
    lab.equal(strategy.gather(made, axis=0), expected)

    def code(number):
        here = kd.get_replica_context()
        own = keras.ops.ones((1, 2)) * (number + 1.0)
        merged = here.merge_call(lambda s, value: s.reduce("SUM", value, axis=None), args=(own,))
        sums = here.all_reduce("SUM", own), here.all_reduce("MEAN", own)
        return merged, *sums, here.all_gather(own, axis=0)

    total, mean = (np.full((1, 2), one, "float32") for one in (numbers.sum(), numbers.mean()))
    expected = total, total, mean, numbers[:, None].repeat(2, axis=1)
    for found, wanted in zip(strategy.run(code, args=(own,)), expected, strict=True):
        for component in strategy.local_results(found):
            lab.equal(component, wanted)


@case("workers")
def shapes_that_do_not_match(lab):
    """Workers with components of other shapes get the error that replicas of one process get."""
    strategy, shape = lab.strategy(), lab.pick((3, 3), (2, 2))
    own = strategy.distribute_values_from_function(lambda context: np.ones(shape, "float32"))
    for call in (
        lambda: strategy.reduce("SUM", own, axis=None),
        lambda: strategy.reduce("MEAN", own, axis=0),
        lambda: strategy.gather(own, axis=0),
    ):
        with lab.raises(kd.errors.ShapeError, r"Expected.*shape.*Received: shapes=\[\(2.*\(3"):
            call()
    whole = strategy.distribute_values_from_function(lambda context: np.ones((2, 3), "float32"))
    total = np.full((2, 3), lab.replicas, "float32")
    lab.equal(strategy.reduce("SUM", whole, axis=None), total)


@case("workers")
def options_of_communication(lab):
    """TensorFlow's gradients travel as the strategy says; what a backend lacks is told."""
    smaller = kd.CommunicationOptions(compression="bf16")
    if lab.backend != "torch":
        with lab.raises(kd.errors.UnsupportedError, "Expected.*compression.*Received.*use PyTorch"):
            lab.strategy(communication_options=smaller)
    if lab.backend != "tensorflow":
        for_others = kd.CommunicationOptions(implementation="RING", timeout_seconds=7.5)
        with lab.told("without implementation, timeout_seconds on") as warned:
            lab.strategy(communication_options=for_others)
        lab.check(warned, "no warning")
        return
    options = kd.CommunicationOptions(bytes_per_pack=8, implementation="NCCL")
    with lab.told("Sums go by RING") as warned:
        strategy = lab.strategy(communication_options=options)
    lab.check(warned, "no warning")
    x, y = regression(7)
    found = []
    for one in (strategy, lab.strategy()):
        keras.utils.set_random_seed(1)
        with one.scope():
            model = dense()
        fit(x, y, batch_size=4)(model)
        found.append(values(model.weights))
    for own, expected in zip(*found, strict=True):
        lab.equal(own, expected)


@case("workers")
def custom_loop(lab):
    """A custom loop gives the weights of one device."""
    batches = [regression(8, seed=seed) for seed in range(3)]
    model = same_loop(lab, dense, batches, lab.strategy())
    lab.alike([array.tolist() for array in values(model.weights)])


@case("workers")
def steps_leave_no_threads(lab):
    """Neither a step of `fit` nor one of a compiled loop leaves a thread behind."""
    strategy, model = lab.strategy(), lab.made(dense)
    x, y = regression(16)

    @kd.function
    def total(value):
        return strategy.reduce("SUM", strategy.run(lambda: value), axis=None)

    def work(times):
        model.fit(x, y, batch_size=8, epochs=times, verbose=0)
        for _ in range(times):
            total(keras.ops.ones(3))
        return len(list(Path("/proc/self/task").iterdir()))

    work(2)
    before, after = work(2), work(20)
    # Some are started when they are needed first; TensorFlow's time-outs were two a collective.
    lab.check(after < before + 30, f"threads: {before}, 60 steps later {after}")


@case("workers", backends=("tensorflow",))
def statistics_travel_with_the_gradients(lab):
    """Moving statistics of each worker's own rows take no collective beside that of gradients."""
    from kerasdist.backends.tensorflow.replica.all_reduce import AllReduce

    x, y = regression(8)

    def collectives(normalizations):
        normal = [keras.layers.BatchNormalization() for _ in range(normalizations)]
        layers = [keras.layers.Dense(4), *normal, keras.layers.Dense(1)]
        model = lab.made(lambda: stack(layers, "sgd"), batch_norm="per_replica")
        made = AllReduce._in_graph
        with mock.patch.object(AllReduce, "_in_graph", autospec=True, side_effect=made) as traced:
            model.fit(x, y, batch_size=4, verbose=0)
        return traced.call_count

    one, three = collectives(1), collectives(3)
    lab.check(one == three > 0, f"collectives: {one} with one layer, {three} with three")


@case("workers", backends=("jax", "torch"))
def threads_of_gloo_wait_for_their_turn(lab):
    """Threads of the framework that exchange bytes do not interrupt those that compute."""
    threads = [int(one.name) for one in Path("/proc/self/task").iterdir()]
    kinds = [os.sched_getscheduler(one) for one in threads]
    lab.check(os.SCHED_BATCH in kinds, f"{kinds}")
    lab.equal(os.SCHED_OTHER, os.sched_getscheduler(0))


@case("workers")
def variables_that_add_up(lab):
    """Variables that replicas of all workers assign, and what each keeps of one, add up."""
    strategy, numbers = lab.strategy(), sum(range(lab.replicas))
    with strategy.scope():
        mirrored = keras.Variable(np.float32(0), aggregation="sum")
        kept = keras.Variable(np.float32(0), synchronization="on_read", aggregation="sum")

    def step(number):
        mirrored.assign(number)
        kept.assign_add(number)
        return kept.value + 0

    for count in (1.0, 2.0):
        here = strategy.local_results(strategy.run(step, args=(numbered(strategy),)))
        lab.equal([count * one for one in strategy.local_replicas], [float(one) for one in here])
    lab.equal(np.float32(numbers), keras.ops.convert_to_numpy(mirrored))
    lab.equal(np.float32(2 * numbers), keras.ops.convert_to_numpy(kept))


# PyTorch's workers are those of `test_checks`.
@case("workers", backends=("tensorflow", "jax"))
def of_kerasdist_test(lab):
    """What `kerasdist test` finds is the same on every worker, and well."""
    from kerasdist.cli.diagnostics import cluster_test_worker as worker

    strategy = lab.strategy()
    found = [
        worker.devices(strategy, 0.0),
        *worker.collectives(strategy),
        *worker.equality(strategy),
    ]
    names = ["devices", "sum", "gather", "broadcast", "training", "workers"]
    lab.equal([one.check for one in found], names)
    lab.check({one.verdict for one in found} == {"ok"}, str(found))
    lab.alike([(one.verdict, one.found) for one in found])


@case("workers")
def model_made_outside_of_the_scope(lab):
    """Training a model made outside is refused in a job, unless another was made in the scope."""
    x, y = regression(6)
    pattern = r"\[worker \d/\d\] Expected a model made in the scope.*Received: model=.*scope\(\)"

    def plain():
        return stack([keras.layers.Dense(1)], "sgd")

    model, main = plain(), lab.strategy()
    with main.scope(), lab.raises(kd.errors.ScopeError, pattern):
        model.fit(x, y, verbose=0)
    strategies = list(ownership._strategies)
    used = [strategy.is_used for strategy in strategies]
    lab.check(main.is_used, "models were made in the scope of the group's strategy")
    try:
        for strategy in strategies:
            strategy.is_used = False
        for call in (model.fit, model.train_on_batch):
            with lab.raises(kd.errors.ScopeError, pattern):
                call(x, y)
        for call in ("evaluate", "predict", "test_on_batch"):
            other, arguments = plain(), (x,) if call.startswith("predict") else (x, y)
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                for _ in range(2):
                    getattr(other, call)(*arguments)
            said = [str(one.message) for one in told if "made outside" in str(one.message)]
            lab.check(len(said) == 1 and f"`{call}` runs on one device" in said[0], f"{said}")
            lab.equal({one.filename for one in told if str(one.message) in said}, {__file__})
    finally:
        for strategy, flag in zip(strategies, used, strict=True):
            strategy.is_used = flag
    model.fit(x, y, verbose=0)  # beside models in the scope it is clearly meant


@case("workers")
def predictions_are_written_by_the_worker_that_has_them(lab):
    """`kd.predict_to`: together the workers write each row once, with the outputs of `predict`."""
    x, _ = regression(23)
    model = lab.made(two_outputs)
    check_predict_to(lab, model, x)


@case("workers")
def strategy_of_one_process_beside_the_jobs(lab):
    """In a worker that has joined the job, OneDeviceStrategy trains on this worker alone."""
    x, y = regression(6)
    with kd.OneDeviceStrategy("cpu:0").scope():
        model = dense()
    model.fit(x + lab.job.rank, y, verbose=0)
    weights = repr(model.get_weights()[0].tolist())
    lab.equal(lab.job.num_workers, len(set(lab.everyone(weights))))
