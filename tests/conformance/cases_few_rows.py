"""Batches with fewer examples than replicas: what a replica without example does never counts."""

import numpy as np

from tests.conformance.actions import evaluate, fit, predict
from tests.conformance.compare import FLOAT16
from tests.conformance.lazy import keras, tf
from tests.conformance.models import (
    VOCABULARY,
    classification,
    classifier,
    compiled,
    in_half_precision,
    regression,
    stack,
    tokens,
    weights_for,
)
from tests.conformance.registry import REPLICAS, case

# The first batch and the last batch are small.
PARTS = (slice(0, 1), slice(1, 6), slice(6, 9), slice(9, 10))
N = 10
X, Y = regression(N)


def batches(*arrays):
    return lambda: (tuple(rows[part] for rows in arrays) for part in PARTS)


def dataset(batch_of, *signature):
    """The same of `tf.data`, of batches that a function makes of some of the rows."""
    source = tf.data.Dataset.from_generator(
        lambda: map(batch_of, PARTS), output_signature=signature
    )
    return source.apply(tf.data.experimental.assert_cardinality(len(PARTS)))


def acts(x, *others):
    return [
        fit(batches(x, *others), steps_per_epoch=len(PARTS)),
        evaluate(batches(x, *others), steps=len(PARTS)),
        predict(x, batch_size=4),
        predict(x[:1], batch_size=4),
    ]


@case("few rows")
def masks_and_weights(lab):
    """A mask, sample weights that may be zero, `weighted_metrics`, and `class_weight`."""
    ids, weights = tokens(N), weights_for(N) + 0.1
    layers = keras.layers
    y = np.sin(np.arange(N * ids.shape[1], dtype="float32")).reshape(N, ids.shape[1], 1)

    def sequences():
        inputs = keras.Input((ids.shape[1],), dtype="int32")
        words = layers.Embedding(VOCABULARY, 3, mask_zero=True)
        inner = [words, layers.LSTM(3, return_sequences=True), layers.Dense(1)]
        loss = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
        return stack(inner, None, loss, inputs, metrics=["mae"], weighted_metrics=["mse"])

    lab.same(sequences, *acts(ids, y, np.repeat(weights[:, None], ids.shape[1], 1)))
    x, classes = classification(9)
    weighted = fit(x, classes, batch_size=4, shuffle=False, class_weight={0: 1.0, 1: 3.0, 2: 0.5})
    lab.same(classifier, weighted)


@case("few rows", like="few_rows.masks_and_weights")
def half_precision(lab):
    """`mixed_float16` with loss scaling, normalization and sample weights."""
    lab.same(in_half_precision, *acts(X, Y, weights_for(N) + 0.1), tolerance=FLOAT16)


@case("few rows", backends=("tensorflow",))
def sparse_ragged_and_strings(lab):
    """Sparse and ragged tensors and strings, in dicts."""
    kept = np.where(X > 0, X, 0)
    words = np.array([["a"], ["b"], ["c"], ["b"], ["a"], ["d"], ["c"], ["a"], ["b"], ["z"]])

    def build():
        layers = keras.layers
        sparse = keras.Input((4,), sparse=True, name="sparse")
        text = keras.Input((1,), dtype="string", name="text")
        index = layers.StringLookup(vocabulary=["a", "b", "c"])(text)
        embedded = layers.Flatten()(layers.Embedding(4, 2)(index))
        merged = layers.Concatenate()([layers.Dense(3)(sparse), embedded])
        model = keras.Model({"sparse": sparse, "text": text}, layers.Dense(1)(merged))
        return compiled(model, keras.optimizers.SGD(0.1), "mse")

    def batch_of(part):
        inputs = {"sparse": tf.sparse.from_dense(kept[part]), "text": tf.constant(words[part])}
        return inputs, tf.constant(Y[part])

    texts, targets = tf.TensorSpec((None, 1), tf.string), tf.TensorSpec((None, 1))
    inputs = {"sparse": tf.SparseTensorSpec((None, 4), tf.float32), "text": texts}
    mixed = lambda: dataset(batch_of, inputs, targets)  # noqa: E731
    lab.same(build, fit(mixed), evaluate(mixed), lambda m: m.predict(mixed(), verbose=0))

    class MeanOfRagged(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(1)

        def call(self, ragged):
            return self.dense(tf.reduce_mean(ragged, 1)[:, None])

    def of_ragged():
        model = MeanOfRagged()
        model.build((None, 1))
        return compiled(model, keras.optimizers.SGD(0.1), "mse")

    lengths = np.arange(N) % 3 + 1
    whole = tf.RaggedTensor.from_row_lengths(np.arange(lengths.sum(), dtype="float32"), lengths)

    raggeds = tf.RaggedTensorSpec((None, None), tf.float32)
    ragged = lambda: dataset(lambda part: (whole[part], Y[part]), raggeds, targets)  # noqa: E731
    lab.same(of_ragged, lambda m: m.predict(ragged(), verbose=0))


@case("few rows", replicas=REPLICAS)
def optional_inputs(lab):
    """None among the inputs, in lists and dicts: `fit`, `evaluate`, `predict`, on batches."""
    x, y = regression(9)

    class Sum(keras.layers.Layer):
        def call(self, one, two=None):
            return one if two is None else one + two

        def compute_output_spec(self, one, two=None):
            return keras.KerasTensor(one.shape, one.dtype)

    def functional():
        one, two = keras.Input((4,)), keras.Input((4,), optional=True)
        model = keras.Model([one, two], keras.layers.Dense(1)(Sum()(one, two)))
        return compiled(model, keras.optimizers.SGD(0.1), "mse")

    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(1)

        def call(self, inputs):
            return self.dense(inputs["one"] if inputs["two"] is None else inputs["two"])

    def own():
        return compiled(Own(), keras.optimizers.SGD(0.1), "mse")

    def actions(given, few):
        return [
            predict(given, batch_size=4),  # before anything is built
            fit(given, y, batch_size=4, shuffle=False),
            evaluate(given, y, batch_size=4),
            lambda model: model.train_on_batch(few, y[:1]),
            lambda model: model.test_on_batch(few, y[:1]),
            lambda model: model.predict_on_batch(few),
        ]

    lab.same(functional, *actions([x, None], [x[:1], None]))
    lab.same(own, *actions({"one": x, "two": None}, {"one": x[:1], "two": None}))
