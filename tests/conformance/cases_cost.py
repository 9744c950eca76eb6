"""What a step may not cost beyond plain Keras: a trace, a compilation, a wait of the host."""

import contextlib
from unittest import mock

from tests.conformance import counters
from tests.conformance.lazy import keras, tf
from tests.conformance.models import dense, regression, stack
from tests.conformance.registry import case
from tests.environment import everything

# Five steps, the last of them ragged.
N, BATCH = 32, 7
X, Y = regression(N)


def built(strategy, **options):
    with strategy.scope() if strategy else contextlib.nullcontext():
        return dense(**options)


def traces_by_epoch(lab, strategy, steps):
    """How often functions had been traced: at the start of each epoch and after each call."""
    model = built(strategy, steps_per_execution=steps)
    counts: list[list[int]] = []
    with counters.traces(lab.backend) as traces:
        note = lambda *_, **__: counts[-1].append(traces.count)  # noqa: E731
        callback = keras.callbacks.LambdaCallback(on_epoch_begin=note, on_train_end=note)
        options = {"batch_size": BATCH, "verbose": 0}
        for _ in range(2):
            counts.append([])
            model.fit(X, Y, epochs=3, validation_data=(X, Y), callbacks=[callback], **options)
            model.evaluate(X, Y, **options)
            note()
            model.predict(X, **options)
            note()
    return counts


@case("cost of a step", backends=("tensorflow", "jax"))
def no_trace_after_the_first_epoch(lab):
    """Nothing is traced or compiled after the first epoch; in a second `fit`, as in plain Keras."""
    for steps in (1, 3) if everything() else (1,):
        plain = traces_by_epoch(lab, None, steps)
        first, second = traces_by_epoch(lab, lab.strategy(), steps)
        start, *epochs, _, _ = first
        lab.check(epochs[0] > start, "the first epoch traces: else nothing is counted here")
        lab.check(epochs[0] == epochs[-1], f"traced after the first epoch: {first}")
        allowed = plain[1][-1] - plain[0][-1]
        again = second[-1] - first[-1]
        lab.check(again <= allowed, f"traced again: {again} times, plain Keras {allowed}")


@case("cost of a step", backends=("tensorflow",), replicas=(2,))
def a_layer_is_traced_few_times(lab):
    """The first `fit` traces a layer few times: shapes, replicas, the check."""
    calls = []

    class Own(keras.layers.Layer):
        def call(self, x):
            calls.append(x.shape)
            return x * 2.0

    for check, times in (("off", 1), ("warn", 2)):
        model = lab.made(lambda: stack([Own(), keras.layers.Dense(1)], "sgd"), check=check)
        calls.clear()
        model.fit(X[:28], Y[:28], batch_size=BATCH, verbose=0)
        lab.equal(times * (1 + lab.replicas), len(calls))


def reads_per_step(lab, strategy):
    """By ``fit``, by ``evaluate``, and by ``fit`` with a callback that reads a value each step."""
    model = built(strategy)
    read = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: float(keras.ops.sum(keras.ops.ones(2)))
    )
    options = {"batch_size": BATCH, "verbose": 0}
    model.fit(X, Y, **options)
    model.evaluate(X, Y, **options)
    with counters.reads(lab.backend, model, "train_function") as fit:
        model.fit(X, Y, **options)
    with counters.reads(lab.backend, model, "test_function") as evaluate:
        model.evaluate(X, Y, **options)
    with counters.reads(lab.backend, model, "train_function") as reading:
        model.fit(X, Y, callbacks=[read], **options)
    return {"fit": fit.per_step, "evaluate": evaluate.per_step}, reading.per_step


@case("cost of a step")
def the_host_waits_for_no_step(lab):
    """The host reads no more values from the devices in a step than in plain Keras.

    It does wait, for an eighth of the steps, on several CPU devices of JAX: see
    kerasdist/backends/jax/mesh/placement.py.
    """
    plain, _ = reads_per_step(lab, None)
    ours, reading = reads_per_step(lab, lab.strategy())
    lab.check(reading >= ours["fit"] + 1, "a read in a step must be counted")
    for name, count in ours.items():
        lab.check(count <= plain[name], f"reads a step of {name}: {count}, plain {plain[name]}")


@contextlib.contextmanager
def _begun_pipelines():
    """Collects those that iterators begin with."""
    datasets = []
    kind = type(iter(tf.data.Dataset.range(1)))
    begin = kind._create_iterator

    def noted(iterator, dataset):
        datasets.append(dataset)
        begin(iterator, dataset)

    with mock.patch.object(kind, "_create_iterator", noted):
        yield datasets


@case("cost of an epoch", backends=("tensorflow",))
def no_wait_for_a_tuner(lab):
    """Nothing tunes the pipeline of arrays, for whose end that of an epoch would wait.

    A dataset of the user's is tuned as ever.
    """
    model = built(lab.strategy())
    dataset = tf.data.Dataset.from_tensor_slices((X, Y)).batch(BATCH)
    sources = {"arrays": ((X, Y), {"batch_size": BATCH}), "dataset": ((dataset,), {})}
    tuned = {}
    for name, (source, options) in sources.items():
        with _begun_pipelines() as begun:
            model.fit(*source, verbose=0, **options)
        tuned[name] = [one.options().autotune.enabled is not False for one in begun]
    lab.check(tuned["arrays"] and not any(tuned["arrays"]), f"arrays are tuned: {tuned}")
    lab.check(tuned["dataset"] and all(tuned["dataset"]), f"the dataset is not tuned: {tuned}")
