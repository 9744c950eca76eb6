"""Batches with fewer examples than replicas: what a replica without example does never counts."""

import numpy as np

from tests.conformance.actions import evaluate, fit, predict
from tests.conformance.compare import FLOAT16
from tests.conformance.lazy import keras
from tests.conformance.models import (
    VOCABULARY,
    classification,
    classifier,
    in_half_precision,
    regression,
    stack,
    tokens,
    weights_for,
)
from tests.conformance.registry import REPLICAS, case

# The first batch is small, the last one too.
SIZES = (1, 5, 3, 1)


def batches(*arrays):
    """A generator of batches of some of the rows."""

    def make():
        begin = 0
        for size in SIZES:
            yield tuple(rows[begin : begin + size] for rows in arrays)
            begin += size

    return make


N = sum(SIZES)
X, Y = regression(N)


def acts(x, *others):
    """Trains, evaluates and predicts in small batches."""
    return [
        fit(batches(x, *others), steps_per_epoch=len(SIZES)),
        evaluate(batches(x, *others), steps=len(SIZES)),
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
    import tensorflow as tf

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
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model

    def pairs():
        begin = 0
        for size in SIZES:
            rows = slice(begin, begin + size)
            inputs = {"sparse": tf.sparse.from_dense(kept[rows]), "text": tf.constant(words[rows])}
            yield inputs, tf.constant(Y[rows])
            begin += size

    def dataset():
        signature = (
            {
                "sparse": tf.SparseTensorSpec((None, 4), tf.float32),
                "text": tf.TensorSpec((None, 1), tf.string),
            },
            tf.TensorSpec((None, 1), tf.float32),
        )
        source = tf.data.Dataset.from_generator(pairs, output_signature=signature)
        return source.apply(tf.data.experimental.assert_cardinality(len(SIZES)))

    lab.same(build, fit(dataset), evaluate(dataset), lambda m: m.predict(dataset(), verbose=0))

    class MeanOfRagged(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(1)

        def call(self, ragged):
            return self.dense(tf.reduce_mean(ragged, 1)[:, None])

    def of_ragged():
        model = MeanOfRagged()
        model.build((None, 1))
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model

    lengths = np.arange(N) % 3 + 1
    whole = tf.RaggedTensor.from_row_lengths(np.arange(lengths.sum(), dtype="float32"), lengths)

    def ragged_batches():
        begin = 0
        for size in SIZES:
            yield whole[begin : begin + size], tf.constant(Y[begin : begin + size])
            begin += size

    def of_raggeds():
        signature = (tf.RaggedTensorSpec((None, None), tf.float32), tf.TensorSpec((None, 1)))
        return tf.data.Dataset.from_generator(ragged_batches, output_signature=signature)

    lab.same(of_ragged, lambda m: m.predict(of_raggeds(), verbose=0))


@case("few rows", replicas=REPLICAS)
def optional_inputs(lab):
    """None among the inputs, in lists and dicts: `fit`, `evaluate`, `predict`, on batches."""
    x, y = regression(9)

    class Sum(keras.layers.Layer):
        def call(self, one, two=None):
            return one if two is None else one + two

        def compute_output_spec(self, one, two=None):
            return keras.KerasTensor(one.shape, one.dtype)

    def functional(names):
        def build():
            one = keras.Input((4,), name="one")
            two = keras.Input((4,), name="two", optional=True)
            inputs = {"one": one, "two": two} if names else [one, two]
            model = keras.Model(inputs, keras.layers.Dense(1)(Sum()(one, two)))
            model.compile(keras.optimizers.SGD(0.1), "mse")
            return model

        return build

    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(1)

        def call(self, inputs):
            return self.dense(inputs["one"] if inputs["two"] is None else inputs["two"])

    def own():
        model = Own()
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model

    def actions(given, few):
        return [
            predict(given, batch_size=4),  # before anything is built
            fit(given, y, batch_size=4, shuffle=False),
            evaluate(given, y, batch_size=4),
            lambda model: model.train_on_batch(few, y[:1]),
            lambda model: model.test_on_batch(few, y[:1]),
            lambda model: model.predict_on_batch(few),
        ]

    in_list, in_dict = (
        actions([x, None], [x[:1], None]),
        actions({"one": x, "two": None}, {"one": x[:1], "two": None}),
    )
    lab.same(functional(names=False), *in_list)
    lab.same(functional(names=True), *in_dict)
    lab.same(own, *in_dict)
