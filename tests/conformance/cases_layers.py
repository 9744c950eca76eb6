"""Each family of Keras's layers, in the environment that users have (`registry.AS_USERS_HAVE_IT`).

Each model is trained, evaluated and asked for predictions in batches of which the first and the
last have one row: fewer than replicas.
"""

import numpy as np

from tests.conformance.actions import evaluate, fit, predict
from tests.conformance.compare import NORMAL
from tests.conformance.lazy import kd, keras
from tests.conformance.models import VOCABULARY, tokens
from tests.conformance.registry import case

SIZES = (1, 4, 1)
N = sum(SIZES)
# Here XLA keeps no compiled programs, and optimizes them, while other suites run.


def rows(*shape):
    drawn = np.random.default_rng(len(shape)).normal(size=(N, *shape))
    return drawn.astype("float32")


def trained(x, y):
    """Trains in small and larger batches, evaluates one row, predicts four and one."""

    def batches():
        begin = 0
        for size in SIZES:
            yield x[begin : begin + size], y[begin : begin + size]
            begin += size

    return [
        fit(batches, steps_per_epoch=len(SIZES)),
        evaluate(x[:1], y[:1]),
        predict(x[:5], batch_size=4),
    ]


def check(lab, layers, x, tolerance=NORMAL):
    """A model of these layers and a dense one on top is the same under a strategy."""

    def build():
        inputs = keras.Input(x.shape[1:], dtype=x.dtype.name)
        outputs = inputs
        for layer in layers(keras.layers):
            outputs = layer(outputs)
        model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Flatten()(outputs)))
        model.compile(keras.optimizers.SGD(0.02), "mse", metrics=["mae"])
        return model

    model = lab.same(build, *trained(x, rows(1)), tolerance=tolerance)
    # Two models that have diverged are equal, too.
    largest = max(float(np.max(np.abs(array))) for array in model.get_weights())
    lab.check(largest < 100, f"the weights should stay small, received {largest}")


@case("layers")
def dense(lab):
    """Dense layers, activations, regularizers."""
    check(
        lab,
        lambda layers: [
            layers.Dense(4, "relu", kernel_regularizer="l2"),
            layers.EinsumDense("ab,bc->ac", output_shape=3, bias_axes="c"),
            layers.PReLU(),
            layers.ActivityRegularization(l2=0.1),
            layers.Dropout(0.0),
        ],
        rows(3),
    )


@case("layers", like="layers.conv_2d")
def conv_1d(lab):
    """Convolutions and pooling over one dimension."""
    check(
        lab,
        lambda layers: [
            layers.ZeroPadding1D(1),
            layers.Conv1D(3, 3, activation="tanh"),
            layers.DepthwiseConv1D(2),
            layers.SeparableConv1D(2, 2),
            layers.Conv1DTranspose(2, 2),
            layers.UpSampling1D(2),
            layers.MaxPooling1D(2),
            layers.AveragePooling1D(2),
        ],
        rows(9, 2),
    )


@case("layers")
def conv_2d(lab):
    """Convolutions, normalization and pooling over two dimensions."""
    check(
        lab,
        lambda layers: [
            layers.ZeroPadding2D(1),
            layers.Conv2D(3, 3, strides=2, use_bias=False),
            layers.BatchNormalization(momentum=0.5),
            layers.Activation("swish"),
            layers.DepthwiseConv2D(2),
            layers.SeparableConv2D(2, 2, padding="same"),
            layers.Conv2DTranspose(2, 2, strides=2),
            layers.MaxPooling2D(2),
            layers.Cropping2D(((0, 1), (0, 1))),
            layers.GlobalAveragePooling2D(),
        ],
        rows(11, 11, 2),
    )


@case("layers", like="layers.conv_2d")
def conv_3d(lab):
    """Convolutions and pooling over three dimensions."""
    check(
        lab,
        lambda layers: [
            layers.Conv3D(2, 2, activation="tanh"),
            layers.Conv3DTranspose(2, 2),
            layers.AveragePooling3D(2),
            layers.GlobalMaxPooling3D(),
        ],
        rows(4, 4, 4, 1),
    )


@case("layers", like="losses.embedding_and_lstm")
def recurrent(lab):
    """Embedding with a mask, and recurrent layers."""
    check(
        lab,
        lambda layers: [
            layers.Embedding(VOCABULARY, 3, mask_zero=True),
            layers.LSTM(2, return_sequences=True),
            layers.TimeDistributed(layers.Dense(2)),
            layers.Bidirectional(layers.GRU(2)),
        ],
        tokens(N),
    )


@case("layers")
def attention(lab):
    """Attention and layer normalization."""

    class Block(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            layers = keras.layers
            self.heads = layers.MultiHeadAttention(2, 3)
            self.norm = layers.LayerNormalization()
            self.additive = layers.AdditiveAttention()

        def call(self, x):
            return self.additive([x, self.norm(x + self.heads(x, x))])

    check(lab, lambda layers: [Block()], rows(4, 4))


@case("layers")
def normalization(lab):
    """Normalization layers."""
    check(
        lab,
        lambda layers: [
            layers.Normalization(mean=0.5, variance=2.0),
            layers.GroupNormalization(2),
            layers.RMSNormalization(),
            layers.UnitNormalization(),
            layers.SpectralNormalization(layers.Dense(3)),
            layers.BatchNormalization(momentum=0.5),
        ],
        rows(4),
    )


@case("layers", like="layers.dense")
def preprocessing(lab):
    """Preprocessing layers, inside of the model."""
    check(
        lab,
        lambda layers: [
            layers.Rescaling(0.5, offset=0.1),
            layers.Resizing(6, 6),
            layers.CenterCrop(4, 4),
            layers.Discretization([-0.5, 0.0, 0.5]),
            layers.Flatten(),
            layers.CategoryEncoding(4, output_mode="multi_hot"),
        ],
        rows(5, 5, 1),
    )


@case("layers", like="layers.dense")
def reshaping_and_merging(lab):
    """Reshaping, and layers that merge."""

    class Merged(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            layers = keras.layers
            self.merges = [layers.Add(), layers.Multiply(), layers.Maximum(), layers.Average()]
            self.dot, self.concatenate = layers.Dot(axes=2, normalize=True), layers.Concatenate()

        def call(self, x):
            merged = self.concatenate([merge([x, x + 1.0]) for merge in self.merges])
            return self.dot([merged, merged])

    check(
        lab,
        lambda layers: [
            layers.Dense(6),
            layers.Reshape((2, 3)),
            layers.Permute((2, 1)),
            Merged(),
            layers.Flatten(),
            layers.RepeatVector(2),
        ],
        rows(3),
    )


@case("layers", replicas=(2,))
def own_loop(lab):
    """A custom loop with a convolution: `strategy.run`, gradients, `optimizer.apply`."""
    x, y = rows(6, 6, 1)[:4], rows(1)[:4]

    def build():
        layers = keras.layers
        return keras.Sequential(
            [keras.Input((6, 6, 1)), layers.Conv2D(2, 3), layers.Flatten(), layers.Dense(1)]
        )

    def plain(model):
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model.train_on_batch(x, y)

    _, expected = lab.run(build, [plain])

    def looped(model):
        with strategy.scope():
            optimizer = keras.optimizers.SGD(0.1)
            optimizer.build(model.trainable_variables)

        def replica_step(batch):
            inputs, targets = batch

            def loss():
                each = keras.ops.mean(keras.ops.square(model(inputs) - targets), axis=-1)
                return kd.compute_average_loss(each, global_batch_size=4)

            value, gradients = kd.value_and_grad(loss, model.trainable_variables)
            optimizer.apply(gradients, model.trainable_variables)
            return value

        @kd.function
        def step(batch):
            return strategy.reduce("SUM", strategy.run(replica_step, args=(batch,)), axis=None)

        half = strategy.distribute_values_from_function(
            lambda context: tuple(
                array[2 * context.replica_id_in_sync_group :][:2] for array in (x, y)
            )
        )
        return step(half)

    strategy = kd.MirroredStrategy(["cpu:0", "cpu:1"])
    _, actual = lab.run(build, [looped], strategy)
    lab.equal([float(value) for value in expected.results], [float(v) for v in actual.results])
    lab.equal(expected.weights, actual.weights)
