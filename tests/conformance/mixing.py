"""Five public examples that mix the examples of a batch, small, as they are and repaired.

Each returns a model and a batch. `repaired` says how: by `kd.global_batch`, or by a mean.
"""

from typing import Any

import numpy as np

from tests.conformance import steps
from tests.conformance.lazy import kd, keras


def identity(tensor):
    return tensor


def collaborative_filtering(backend: str, *, repaired: bool) -> tuple[Any, tuple[Any, ...]]:
    """keras.io/examples/structured_data/collaborative_filtering_movielens."""
    ops, layers = keras.ops, keras.layers
    everyone = kd.global_batch if repaired else identity

    class RecommenderNet(keras.Model):
        def __init__(self):
            super().__init__()
            self.users, self.user_bias = layers.Embedding(7, 4), layers.Embedding(7, 1)
            self.movies, self.movie_bias = layers.Embedding(9, 4), layers.Embedding(9, 1)

        def call(self, inputs):
            user, movie = self.users(inputs[:, 0]), self.movies(inputs[:, 1])
            dot = ops.tensordot(everyone(user), everyone(movie), 2)
            return ops.sigmoid(dot + self.user_bias(inputs[:, 0]) + self.movie_bias(inputs[:, 1]))

    model = RecommenderNet()
    model.compile(keras.optimizers.Adam(0.01), "binary_crossentropy")
    random = np.random.default_rng(0)
    x = np.stack([random.integers(0, 7, 12), random.integers(0, 9, 12)], 1).astype("int32")
    return model, (x, random.uniform(size=(12, 1)).astype("float32"))


def named_entities(backend: str, *, repaired: bool) -> tuple[Any, tuple[Any, ...]]:
    """keras.io/examples/nlp/ner_transformers: a loss divided by the words of the batch."""
    ops = keras.ops
    everyone = kd.global_batch if repaired else identity

    class CustomNonPaddingTokenLoss(keras.losses.Loss):
        def __init__(self):
            super().__init__(name="custom_ner_loss", reduction=None)

        def call(self, y_true, y_pred):
            y_true, y_pred = everyone(y_true), everyone(y_pred)
            loss = ops.sparse_categorical_crossentropy(y_true, y_pred, from_logits=True)
            mask = ops.cast(y_true > 0, "float32")
            return ops.sum(loss * mask) / ops.sum(mask)

    inputs = keras.Input((5,), dtype="int32")
    model = keras.Model(inputs, keras.layers.Dense(4)(keras.layers.Embedding(11, 6)(inputs)))
    model.compile("adam", CustomNonPaddingTokenLoss())
    random = np.random.default_rng(0)
    x = random.integers(1, 11, (11, 5)).astype("int32")
    y = random.integers(1, 4, (11, 5)).astype("int32")
    y[np.arange(5) >= np.sort(random.integers(1, 6, 11))[:, None]] = 0
    return model, (x, y)


def supervised_contrastive(backend: str, *, repaired: bool) -> tuple[Any, tuple[Any, ...]]:
    """keras.io/examples/vision/supervised-contrastive-learning: all pairs of the batch."""
    ops = keras.ops
    everyone = kd.global_batch if repaired else identity

    class SupervisedContrastiveLoss(keras.losses.Loss):
        def call(self, labels, features):
            labels, features = everyone(labels), everyone(features)
            features = features / ops.norm(features, axis=1, keepdims=True)
            logits = ops.matmul(features, ops.transpose(features)) / 0.5
            same = ops.cast(ops.equal(labels, ops.transpose(labels)), logits.dtype)
            same = same / ops.sum(same, axis=1, keepdims=True)
            return -ops.mean(ops.sum(same * ops.log_softmax(logits, axis=1), axis=1))

    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(5, activation="tanh")])
    model.compile("adam", SupervisedContrastiveLoss())
    random = np.random.default_rng(0)
    x = random.normal(size=(12, 6)).astype("float32")
    return model, (x, random.integers(0, 3, (12, 1)).astype("int32"))


def added_sum(backend: str, *, repaired: bool) -> tuple[Any, tuple[Any, ...]]:
    """Keras's guide to layers: `add_loss` of a sum over the batch."""
    ops = keras.ops

    class ActivityRegularization(keras.layers.Layer):
        def call(self, inputs):
            values = ops.sum(ops.square(inputs), axis=-1)
            self.add_loss(0.01 * (ops.mean(values) if repaired else ops.sum(values)))
            return inputs

    inputs = keras.Input((4,))
    hidden = ActivityRegularization()(keras.layers.Dense(6, activation="relu")(inputs))
    model = keras.Model(inputs, keras.layers.Dense(1)(hidden))
    model.compile("adam", "mse")
    random = np.random.default_rng(0)
    x = random.normal(size=(12, 4)).astype("float32")
    return model, (x, random.normal(size=(12, 1)).astype("float32"))


def triplet_sum(backend: str, *, repaired: bool) -> tuple[Any, tuple[Any, ...]]:
    """keras.io/examples/vision/siamese_network, with the sum of its triplet losses."""
    model = steps.of(backend).triplet_model(repaired=repaired)()
    model.compile(keras.optimizers.Adam(0.01))
    random = np.random.default_rng(0)
    triplets = tuple(random.normal(size=(12, 4)).astype("float32") for _ in range(3))
    model(triplets[0])
    return model, (triplets,)


EXAMPLES = (collaborative_filtering, named_entities, supervised_contrastive, added_sum, triplet_sum)
