"""Metrics whose state is a sum, and those whose state is none (trap 7)."""

import contextlib
import operator

import numpy as np

from tests.conformance.actions import evaluate, fit
from tests.conformance.lazy import keras
from tests.conformance.models import (
    binary,
    classification,
    classifier,
    compiled,
    dense,
    largest_error,
    regression,
    stack,
    watched,
    weights_for,
)
from tests.conformance.registry import REPLICAS, case

N, BATCH = 25, 6  # at last a batch of one row
X, Y = regression(N)


def check(lab, build, x, y, **options):
    options = {"batch_size": BATCH, **options}
    lab.same(build, fit(x, y, **options), evaluate(x, y, **options))


def binary_model(**options):
    return stack(
        [keras.layers.Dense(1, activation="sigmoid")],
        keras.optimizers.SGD(0.1),
        "binary_crossentropy",
        **options,
    )


def categorical(**options):
    return compiled(classifier(), keras.optimizers.SGD(0.1), "categorical_crossentropy", **options)


def of_two_outputs(**options):
    return stack([keras.layers.Dense(2)], keras.optimizers.SGD(0.05), **options)


def one_hot(n):
    x, labels = classification(n)
    return x, np.eye(3, dtype="float32")[labels]


# By name: the title, the data, the model, and what `compile` gets.
OF_KERAS = {
    "of_classification": (
        "Accuracy, top-k, cross-entropy, `MeanIoU`, confusion matrices",
        classification,
        classifier,
        lambda m: {
            "metrics": [
                "accuracy",
                m.SparseTopKCategoricalAccuracy(2),
                m.SparseCategoricalCrossentropy(),
                m.MeanIoU(num_classes=3, sparse_y_pred=False),
            ]
        },
    ),
    "of_binary_classification": (
        "`AUC` (PR), precision, `F1Score`, counts, at thresholds; `weighted_metrics` beside others",
        lambda n: (*binary(n), weights_for(n)),
        binary_model,
        lambda m: {
            "metrics": [
                m.AUC(curve="PR", num_thresholds=50, name="pr"),
                m.Precision(),
                m.F1Score(threshold=0.5),
                m.FalseNegatives(),
                m.SensitivityAtSpecificity(0.5),
                m.BinaryIoU(),
                m.Hinge(),
            ],
            "weighted_metrics": [m.AUC(name="weighted_auc"), m.Precision(name="weighted")],
        },
    ),
    "of_one_hot_classification": (
        "`OneHotMeanIoU`, `F1Score` and `FBetaScore` by class, `AUC` by label",
        one_hot,
        categorical,
        lambda m: {
            "metrics": [
                "accuracy",
                m.F1Score(average="macro"),
                m.FBetaScore(beta=2.0, average="weighted", name="fbeta"),
                m.OneHotMeanIoU(num_classes=3),
                m.AUC(multi_label=True, num_labels=3),
                m.KLDivergence(),
            ]
        },
    ),
    "of_regression": (
        "`R2Score`, root mean square, cosine similarity, correlations, logarithmic errors",
        lambda n: regression(n, outputs=2),
        of_two_outputs,
        lambda m: {
            "metrics": [
                m.R2Score(),
                m.RootMeanSquaredError(),
                m.MeanAbsolutePercentageError(),
                m.CosineSimilarity(),
                m.LogCoshError(),
                m.MeanSquaredLogarithmicError(),
                m.PearsonCorrelation(),
                m.ConcordanceCorrelation(),
            ]
        },
    ),
}


def metrics_case(name, title, data, build, metrics):
    def checked(lab):
        x, y, *weights = data(N)
        options = {"sample_weight": weights[0]} if weights else {}
        check(lab, lambda: build(**metrics(keras.metrics)), x, y, **options)

    like = "" if name == "of_classification" else "metrics.of_classification"
    case("metrics", name=name, title=title, like=like)(checked)


for _name, _kind in OF_KERAS.items():
    metrics_case(_name, *_kind)


def own_metrics():
    """Metrics of the user whose state is no mean over the examples, and functions."""
    ops = keras.ops

    class Own(keras.metrics.Metric):
        def __init__(self, name, **initial):
            super().__init__(name=name)
            for key, value in initial.items():
                constant = keras.initializers.Constant(value)
                setattr(self, key, self.add_variable((), constant, name=key))

        def result(self):
            return ops.convert_to_tensor(self.state)

    class Seen(Own):
        """Which signs predictions had: a set."""

        def __init__(self):
            super().__init__("seen")
            self.state = self.add_variable((2,), "zeros", name="state")

        def update_state(self, y_true, y_pred, sample_weight=None):
            signs = ops.concatenate([y_pred > 0.5, y_pred <= 0.5], axis=-1)
            signs = ops.max(ops.cast(signs, "float32"), axis=0)
            self.state.assign(ops.maximum(self.state, signs))

        def result(self):
            return ops.sum(self.state)

    class Updates(Own):
        """One a global batch."""

        def update_state(self, y_true, y_pred, sample_weight=None):
            self.state.assign(self.state + 1.0)

    class Range(Own):
        """The result is a dict, and the state does not begin with zero."""

        def update_state(self, y_true, y_pred, sample_weight=None):
            self.low.assign(ops.minimum(self.low, ops.min(y_pred)))
            self.high.assign(ops.maximum(self.high, ops.max(y_pred)))

        def reset_state(self):
            self.low.assign(1e9)
            self.high.assign(-1e9)

        def result(self):
            return {"low": self.low + 0.0, "high": self.high + 0.0}

    class Spread(keras.metrics.Mean):
        """Updates itself with a value of its own."""

        def update_state(self, y_true, y_pred, sample_weight=None):
            return super().update_state(ops.max(y_pred) - ops.min(y_pred))

    def by_example(y_true, y_pred):
        return ops.max(ops.abs(y_true - y_pred), axis=-1)

    def scalar(y_true, y_pred):
        return ops.max(y_pred)

    def number(y_true, y_pred):
        return 0.5

    own = [Seen(), Updates("updates", state=0.0), Range("range", low=1e9, high=-1e9)]
    return [largest_error(), "mae", *own, Spread(name="spread"), by_example, scalar, number]


@case("metrics of the user", replicas=REPLICAS)
def of_the_user(lab):
    """States that are a maximum, a set, a count; a dict; a subclass of `Mean`; functions.

    They begin anew with each epoch and each evaluate.
    """
    lab.same(
        lambda: dense(metrics=[*own_metrics(), keras.metrics.R2Score()]),
        fit(X, Y, batch_size=BATCH, epochs=2, validation_data=(X[:7], Y[:7])),
        evaluate(X[:3], Y[:3]),
        evaluate(X, Y, batch_size=BATCH),
    )


@case("metrics of the user", replicas=REPLICAS)
def calls_of_a_function(lab):
    """A function as metric is called once a step and replica, after its first.

    One that returns a value of the whole batch is called by the first replica alone.
    """
    x, y = regression(23)  # in no batch fewer rows than replicas
    calls = []

    def by_example(y_true, y_pred):
        calls.append("by example")
        return keras.ops.max(keras.ops.abs(y_true - y_pred), axis=-1)

    def scalar(y_true, y_pred):
        calls.append("scalar")
        return keras.ops.max(y_pred)

    def counts(strategy):
        with strategy.scope() if strategy else contextlib.nullcontext():
            model = dense(metrics=[by_example, scalar], run_eagerly=lab.backend == "tensorflow")
        found = []
        for _ in range(2):
            calls.clear()
            model.fit(x, y, batch_size=BATCH, verbose=0)
            found.append([calls.count(name) for name in ("by example", "scalar")])
        return found

    strategy = lab.strategy()
    plain, ours = counts(None), counts(strategy)
    here = strategy.replica_set.local_replicas
    # On JAX `fit` is one program.
    each = [1, 1] if lab.backend == "jax" else [len(here), int(0 in here)]
    expected = [count * times for count, times in zip(plain[1], each, strict=True)]
    lab.check(ours[1] == expected, f"{ours} calls, plain {plain}")
    # At first once more in each replica. The check takes two steps with each of two batches.
    more = len(here) + 2 * (len(here) + 1)
    allowed = [count * times + more for count, times in zip(plain[0], each, strict=True)]
    lab.check(all(map(operator.le, ours[0], allowed)), f"at first {ours} calls, plain {plain}")


@case("metrics of the user", backends=("jax", "torch"))
def function_that_squeezes(lab):
    """A function as metric that returns a scalar for a single row, which a replica may have."""
    x, y = regression(11)

    def build():
        def squeezed(y_true, y_pred):
            return keras.ops.squeeze(keras.ops.abs(y_true - y_pred))

        return dense(metrics=[squeezed])

    options = {"batch_size": lab.replicas + 1}
    lab.same(build, fit(x, y, **options), evaluate(x, y, **options), share_plain=False)


@case("metrics")
def read_twice(lab):
    """A metric that is read in every batch, and again: reading changes nothing."""
    x, y = binary(N)

    def build():
        return binary_model(metrics=[keras.metrics.AUC(name="auc"), largest_error()])

    def action(model):
        seen = []

        class Reader(keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                # On JAX the state is the step's own until the epoch ends, with or without us.
                if lab.backend != "jax":
                    self.read()

            def on_epoch_end(self, epoch, logs=None):
                self.read()

            def read(self):
                metrics = self.model.metrics
                seen.append([float(m.result()) for m in metrics if m.name == "loss"])
                seen.append([self.model.get_metrics_result(), self.model.get_metrics_result()])

        model.fit(x, y, batch_size=BATCH, callbacks=[Reader()], verbose=0)
        return seen

    lab.same(build, action)


# Plain Keras on JAX refuses it: the layer's metric is no part of the step's state.
@case("metrics", backends=("tensorflow", "torch"))
def metric_in_a_layer(lab):
    """A metric that a layer holds and updates in `call`."""
    check(lab, lambda: stack([keras.layers.Dense(5), watched(), keras.layers.Dense(1)]), X, Y)
