"""What the loss divides by: reductions, weights, masks, several outputs (C1's numerics)."""

import numpy as np

from tests.conformance.actions import evaluate, fit
from tests.conformance.lazy import keras
from tests.conformance.models import (
    STEPS_IN_TIME,
    classification,
    compiled,
    dense,
    regression,
    stack,
    tagger,
    tokens,
    weights_for,
)
from tests.conformance.registry import REPLICAS, case

N, BATCH = 13, 6  # at last a batch of one row


def sequence_targets(n):
    return np.random.default_rng(3).normal(size=(n, STEPS_IN_TIME, 1)).astype("float32")


def reduction_case(reduction, like=""):
    def check(lab):
        x, y = tokens(N), sequence_targets(N)
        # A weight for each step: Keras does not broadcast one an example to the mask.
        weights = weights_for(N)[:, None] * np.linspace(0.5, 1.5, STEPS_IN_TIME, dtype="float32")
        # A sum grows with the batch: a smaller rate keeps the steps in the range of the others.
        rate = 0.01 if reduction == "sum" else 0.1

        def build():
            loss = keras.losses.MeanSquaredError(reduction=reduction)
            return compiled(tagger(), keras.optimizers.SGD(rate), loss, weighted_metrics=["mae"])

        options = {"batch_size": BATCH, "sample_weight": weights}
        lab.same(build, fit(x, y, shuffle=False, **options), evaluate(x, y, **options))

    name = f"{reduction}_masked_weighted"
    title = f"`{reduction}` with masks and sample weights"
    case("loss reductions", name=name, title=title, like=like and f"losses.{like}")(check)


# Divided by a size, or by the weights, at the same place of a step. Without masks or weights:
# `generated`.
reduction_case("sum", "sum_over_batch_size_masked_weighted")
reduction_case("sum_over_batch_size")
reduction_case("mean", "mean_with_sample_weight_masked_weighted")
reduction_case("mean_with_sample_weight")


@case("loss reductions", replicas=REPLICAS)
def reduction_none(lab):
    """`reduction=None`: the loss is a vector, as in plain Keras, or the same error."""
    x, y = regression(11)

    def outcome(strategy):
        try:
            action = fit(x, y, batch_size=5, shuffle=False)  # 3 and 2 rows, at last 1 and none
            build = lambda: dense(loss=keras.losses.MeanSquaredError(reduction=None))  # noqa: E731
            return lab.run(build, [action], strategy)[1].results
        except Exception as error:  # noqa: BLE001 (plain Keras decides what is right here)
            return type(error).__name__

    lab.equal(outcome(None), outcome(lab.strategy()))


@case("loss reductions", replicas=REPLICAS)
def of_a_whole_batch(lab):
    """`Dice`, `Tversky` and `Circle`, each one value of all rows, with weights and as functions."""
    n = rows_for(lab)
    x, _ = regression(n)
    kinds = np.random.default_rng(4).integers(0, 2, (n, 3)).astype("float32")
    losses = {
        "function": "dice",
        "sum": keras.losses.Dice(reduction="sum"),
        "weights": keras.losses.Tversky(reduction="mean_with_sample_weight"),
    }

    def check(losses, **options):
        def segmenter():
            inputs = keras.Input((4,))
            outputs = {one: keras.layers.Dense(3, "sigmoid", name=one)(inputs) for one in losses}
            model = keras.Model(inputs, outputs)
            metrics = [keras.losses.tversky, keras.metrics.ConcordanceCorrelation(axis=0)]
            return compiled(model, keras.optimizers.SGD(0.1), losses, metrics={"function": metrics})

        targets = dict.fromkeys(losses, kinds)
        train = fit(x, targets, batch_size=BATCH, shuffle=False, **options)
        lab.same(segmenter, train, evaluate(x, targets, batch_size=BATCH))

    check(losses, sample_weight=dict.fromkeys(losses, weights_for(n)))
    # Its values are those of the columns, which no weight of a row goes with.
    check({**losses, "columns": keras.losses.CosineSimilarity(axis=0)})

    def embedder():
        return stack([keras.layers.Dense(3)], keras.optimizers.SGD(1e-4), keras.losses.Circle())

    x, _ = regression(15)
    labels, weights = np.arange(15) % 2, weights_for(15)
    lab.same(embedder, fit(x, labels, batch_size=5, shuffle=False, sample_weight=weights))


@case("weights", replicas=REPLICAS, like="steps.train_step")
def sample_weight(lab):
    """`sample_weight`, some of it zero, in fit, evaluate and validation."""
    x, y = regression(N)
    options = {"batch_size": BATCH, "sample_weight": weights_for(N)}
    lab.same(
        lambda: dense(weighted_metrics=["mse"]),
        fit(x, y, validation_data=(x, y, weights_for(N, 8)), epochs=2, **options),
        evaluate(x, y, **options),
    )


@case("masks", replicas=REPLICAS)
def replica_all_masked(lab):
    """A masked output: every step of one replica's share is masked, or shares are very uneven."""
    x, y = tokens(8), sequence_targets(8)
    x[4:] = 0
    uneven, targets = tokens(N), sequence_targets(N)
    uneven[:3] = 1
    uneven[3:6, 1:] = 0
    lab.same(
        tagger,
        *(fit(x, y, batch_size=8, shuffle=False), evaluate(x, y, batch_size=8)),
        fit(uneven, targets, batch_size=BATCH, shuffle=False),
        evaluate(uneven, targets, batch_size=BATCH),
    )


def two_outputs(**options):
    inputs = keras.Input((4,))
    hidden = keras.layers.Dense(5, activation="tanh", name="hidden")(inputs)
    outputs = {
        "number": keras.layers.Dense(1, name="number")(hidden),
        "kind": keras.layers.Dense(3, activation="softmax", name="kind")(hidden),
    }
    model = keras.Model(inputs, outputs)
    model.compile(
        optimizer=keras.optimizers.SGD(0.1),
        loss={"number": "mse", "kind": "sparse_categorical_crossentropy"},
        **options,
    )
    return model


def rows_for(lab):
    """How many rows: whole batches where plain Keras counts a last, smaller one as one row.

    Keras 3.16 on TensorFlow does, in the losses of each output (docs/numerics.md).
    """
    return 2 * BATCH if lab.backend == "tensorflow" and lab.keras_version >= (3, 16) else N


@case("several outputs")
def loss_weights(lab):
    """Outputs with `loss_weights`, metrics and sample weights of their own."""
    n = rows_for(lab)
    x, number = regression(n)
    y = {"number": number, "kind": classification(n)[1]}
    weights = {"number": weights_for(n), "kind": weights_for(n, 9) + 0.1}
    lab.same(
        lambda: two_outputs(
            loss_weights={"number": 0.3, "kind": 2.0},
            metrics={"number": ["mae"], "kind": ["accuracy"]},
            weighted_metrics={"number": ["mse"], "kind": ["accuracy"]},
        ),
        fit(x, y, batch_size=BATCH, epochs=2, sample_weight=weights),
        evaluate(x, y, batch_size=BATCH),
    )


@case("several outputs")
def one_target(lab):
    """One target of two outputs, and as many rows in a replica: rows are not targets."""

    def build():
        inputs = keras.Input((6,))
        hidden = keras.layers.Dense(6)(inputs)
        model = keras.Model(inputs, [keras.layers.Dense(6)(hidden), hidden])
        model.compile(keras.optimizers.SGD(0.1), ["mse", None])
        return model

    # Two rows a replica. Plain Keras takes two rows for two targets: a last batch has three.
    rows = 2 * lab.replicas
    x = np.random.default_rng(4).normal(size=(2 * rows + 3, 6)).astype("float32")
    options = {"batch_size": rows}
    lab.same(build, fit(x, x, **options), evaluate(x, x, **options), share_plain=False)
