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
    dense,
    largest_error,
    regression,
    tagger,
    tokens,
    weights_for,
)
from tests.conformance.registry import REPLICAS, case

N, BATCH = 23, 6


def check(lab, build, x, y, **options):
    options = {"batch_size": BATCH, **options}
    lab.same(build, fit(x, y, **options), evaluate(x, y, **options))


@case("metrics")
def of_binary_classification(lab):
    """`AUC` (ROC and PR), precision, recall, `F1Score`, counts, at thresholds."""
    x, y = binary(N)

    def build():
        m = keras.metrics
        return binary_model(
            metrics=[
                m.AUC(name="roc"),
                m.AUC(curve="PR", num_thresholds=50, name="pr"),
                m.Precision(),
                m.Recall(),
                m.F1Score(threshold=0.5),
                m.TruePositives(),
                m.FalseNegatives(),
                m.BinaryAccuracy(),
                m.SensitivityAtSpecificity(0.5),
                m.PrecisionAtRecall(0.5),
                m.BinaryIoU(),
                m.Hinge(),
            ]
        )

    check(lab, build, x, y)


def binary_model(**options):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, activation="sigmoid")])
    model.compile(keras.optimizers.SGD(0.1), "binary_crossentropy", **options)
    return model


@case("metrics")
def of_classification(lab):
    """Accuracy, top-k, cross-entropy, `MeanIoU`, confusion matrices."""
    x, y = classification(N)

    def build():
        m = keras.metrics
        return classifier(
            metrics=[
                "accuracy",
                m.SparseTopKCategoricalAccuracy(2),
                m.SparseCategoricalCrossentropy(),
                m.MeanIoU(num_classes=3, sparse_y_pred=False),
            ]
        )

    check(lab, build, x, y)


@case("metrics")
def of_one_hot_classification(lab):
    """`OneHotMeanIoU`, `F1Score` and `FBetaScore` by class, `AUC` by label."""
    x, labels = classification(N)
    y = np.eye(3, dtype="float32")[labels]

    def build():
        m = keras.metrics
        model = classifier()
        model.compile(
            keras.optimizers.SGD(0.1),
            "categorical_crossentropy",
            metrics=[
                "accuracy",
                m.F1Score(average="macro"),
                m.FBetaScore(beta=2.0, average="weighted", name="fbeta"),
                m.OneHotMeanIoU(num_classes=3),
                m.AUC(multi_label=True, num_labels=3),
                m.KLDivergence(),
            ],
        )
        return model

    check(lab, build, x, y)


@case("metrics")
def of_regression(lab):
    """`R2Score`, root mean square, cosine similarity, correlations, logarithmic errors."""
    x, y = regression(N, outputs=2)

    def build():
        m = keras.metrics
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        model.compile(
            keras.optimizers.SGD(0.05),
            "mse",
            metrics=[
                m.R2Score(),
                m.RootMeanSquaredError(),
                m.MeanAbsolutePercentageError(),
                m.CosineSimilarity(),
                m.LogCoshError(),
                m.MeanSquaredLogarithmicError(),
                m.PearsonCorrelation(),
                m.ConcordanceCorrelation(),
            ],
        )
        return model

    check(lab, build, x, y)


@case("metrics of the user", replicas=REPLICAS)
def state_is_a_maximum(lab):
    """A metric whose state is a maximum."""
    x, y = regression(N)
    check(lab, lambda: dense(metrics=[largest_error(), "mae"]), x, y)


@case("metrics of the user")
def state_is_a_set(lab):
    """A metric whose state is a set of classes seen."""
    x, y = classification(N)

    def build():
        class Seen(keras.metrics.Metric):
            def __init__(self, name="seen", **options):
                super().__init__(name=name, **options)
                self.seen = self.add_variable((3,), "zeros", name="seen")

            def update_state(self, y_true, y_pred, sample_weight=None):
                labels = keras.ops.one_hot(keras.ops.argmax(y_pred, -1), 3, dtype="float32")
                self.seen.assign(keras.ops.maximum(self.seen, keras.ops.max(labels, axis=0)))

            def result(self):
                return keras.ops.sum(self.seen)

        return classifier(metrics=[Seen()])

    check(lab, build, x, y)


@case("metrics of the user")
def state_is_a_count_of_updates(lab):
    """A metric that counts its updates: one a global batch."""
    x, y = regression(N)

    def build():
        class Updates(keras.metrics.Metric):
            def __init__(self, name="updates", **options):
                super().__init__(name=name, **options)
                self.count = self.add_variable((), "zeros", name="count")

            def update_state(self, y_true, y_pred, sample_weight=None):
                self.count.assign(self.count + 1.0)

            def result(self):
                return keras.ops.convert_to_tensor(self.count)

        return dense(metrics=[Updates()])

    check(lab, build, x, y)


@case("metrics of the user")
def subclass_of_keras_metric(lab):
    """A subclass of `Mean` that updates itself with a value of its own."""
    x, y = regression(N)

    def build():
        class Spread(keras.metrics.Mean):
            def update_state(self, y_true, y_pred, sample_weight=None):
                spread = keras.ops.max(y_pred) - keras.ops.min(y_pred)
                return super().update_state(spread)

        return dense(metrics=[Spread(name="spread")])

    check(lab, build, x, y)


@case("metrics of the user")
def result_is_a_dict(lab):
    """A metric that returns a dict."""
    x, y = regression(N)

    def build():
        class Range(keras.metrics.Metric):
            def __init__(self, name="range", **options):
                super().__init__(name=name, **options)
                self.low = self.add_variable((), keras.initializers.Constant(1e9), name="low")
                self.high = self.add_variable((), keras.initializers.Constant(-1e9), name="high")

            def update_state(self, y_true, y_pred, sample_weight=None):
                self.low.assign(keras.ops.minimum(self.low, keras.ops.min(y_pred)))
                self.high.assign(keras.ops.maximum(self.high, keras.ops.max(y_pred)))

            def reset_state(self):
                self.low.assign(1e9)
                self.high.assign(-1e9)

            def result(self):
                return {"low": self.low + 0.0, "high": self.high + 0.0}

        return dense(metrics=[Range()])

    check(lab, build, x, y)


@case("metrics of the user")
def function_metric(lab):
    """A function as metric: a value an example, a scalar, and a plain number of Python's."""
    x, y = regression(N)

    def build():
        def by_example(y_true, y_pred):
            return keras.ops.max(keras.ops.abs(y_true - y_pred), axis=-1)

        def scalar(y_true, y_pred):
            return keras.ops.max(y_pred)

        def number(y_true, y_pred):
            return 0.5

        return dense(metrics=[by_example, scalar, number])

    check(lab, build, x, y)


@case("metrics of the user", replicas=REPLICAS)
def calls_of_a_function(lab):
    """A function as metric is called once a step and replica, after its first.

    DEFECTS 15.
    """
    x, y = regression(N)
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
    local = len(strategy.replica_set.local_replicas)
    each = 1 if lab.backend == "jax" else local  # there `fit` is one program
    lab.check(ours[1] == [each * count for count in plain[1]], f"{ours} calls, plain {plain}")
    # At first once more in each replica. The check takes two steps with each of two batches.
    allowed = [each * count + local + 2 * (local + 1) for count in plain[0]]
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


@case("metrics")
def weighted_metrics(lab):
    """`weighted_metrics` beside unweighted ones, with sample weights."""
    x, y = binary(N)

    def build():
        m = keras.metrics
        return binary_model(
            metrics=[m.AUC(name="auc"), "accuracy"],
            weighted_metrics=[m.AUC(name="weighted_auc"), m.Precision(name="weighted_precision")],
        )

    check(lab, build, x, y, sample_weight=weights_for(N))


@case("metrics")
def masked_metrics(lab):
    """Metrics of a masked output."""
    x = tokens(N)
    y = np.random.default_rng(3).normal(size=(N, 5, 1)).astype("float32")
    check(lab, lambda: tagger(metrics=["mae"], weighted_metrics=["mse"]), x, y)


# Plain Keras on JAX refuses it: the layer's metric is no part of the step's state.
@case("metrics", backends=("tensorflow", "torch"))
def metric_in_a_layer(lab):
    """A metric that a layer holds and updates in `call`."""
    x, y = regression(N)

    def build():
        class Watched(keras.layers.Layer):
            def __init__(self):
                super().__init__()
                self.watch = keras.metrics.Mean(name="activation")

            def call(self, x):
                self.watch.update_state(keras.ops.mean(x, axis=-1))
                return x

        model = keras.Sequential(
            [keras.Input((4,)), keras.layers.Dense(5), Watched(), keras.layers.Dense(1)]
        )
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model

    check(lab, build, x, y)


@case("metrics")
def reset_between_epochs(lab):
    """Metrics begin anew with each epoch and each evaluate."""
    x, y = regression(N)
    metric = [largest_error, keras.metrics.R2Score]
    lab.same(
        lambda: dense(metrics=[make() for make in metric]),
        fit(x, y, batch_size=BATCH, epochs=3, validation_data=(x[:7], y[:7])),
        evaluate(x[:3], y[:3]),
        evaluate(x, y),
    )
