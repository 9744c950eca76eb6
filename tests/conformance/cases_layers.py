"""Each family of Keras's layers, in the environment that users have (`registry.AS_USERS_HAVE_IT`).

Each model is trained, evaluated and asked for predictions in batches of which the first and the
last have one row: fewer than replicas. Here XLA keeps no compiled programs, and optimizes them,
while other suites run.
"""

import numpy as np

from tests.conformance.actions import evaluate, fit, predict
from tests.conformance.compare import NORMAL
from tests.conformance.lazy import kd, keras
from tests.conformance.models import VOCABULARY, compiled, tokens
from tests.conformance.registry import case
from tests.facade.cases_training import Loop

SIZES = (1, 4, 1)
N = sum(SIZES)


def rows(*shape):
    drawn = np.random.default_rng(len(shape)).normal(size=(N, *shape))
    return drawn.astype("float32")


def trained(x, y):
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


def attended(x):
    layers = keras.layers
    heads = layers.MultiHeadAttention(2, 3)(x, x)
    return layers.AdditiveAttention()([x, layers.LayerNormalization()(layers.Add()([x, heads]))])


def seeded():
    return keras.initializers.RandomUniform(seed=3)


def merged(x):
    layers = keras.layers
    merges = [layers.Add(), layers.Multiply(), layers.Maximum(), layers.Average()]
    more = layers.Rescaling(1.0, offset=1.0)(x)
    concatenated = layers.Concatenate()([merge([x, more]) for merge in merges])
    return layers.Dot(axes=2, normalize=True)([concatenated, concatenated])


# By name: the title, the data, the layers below a dense one, and the case like it.
FAMILIES = {
    "dense": (
        "Dense layers, activations, regularizers, reshaping, layers that merge, normalization",
        rows(4),
        lambda layers: [
            layers.Normalization(mean=0.5, variance=2.0),
            layers.Dense(6, "relu", kernel_regularizer="l2"),
            layers.EinsumDense("ab,bc->ac", output_shape=6, bias_axes="c"),
            layers.PReLU(),
            layers.Reshape((2, 3)),
            layers.Permute((2, 1)),
            merged,
            layers.Flatten(),
            layers.ActivityRegularization(l2=0.1),
            layers.Dense(4),
            layers.GroupNormalization(2),
            layers.RMSNormalization(),
            layers.UnitNormalization(),
            layers.SpectralNormalization(layers.Dense(3)),
            layers.BatchNormalization(momentum=0.5),
            layers.Dropout(0.0),
            layers.RepeatVector(2),
        ],
    ),
    "attention": (
        "Attention and layer normalization",
        rows(4, 4),
        lambda _: [attended],
        "layers.dense",
    ),
    "conv_2d": (
        "Convolutions, normalization and pooling over two dimensions; initializers",
        rows(11, 11, 2),
        lambda layers: [
            layers.ZeroPadding2D(1),
            layers.Conv2D(3, 3, strides=2, use_bias=False, kernel_initializer="he_normal"),
            layers.BatchNormalization(momentum=0.5, center=False, scale=False),
            layers.Activation("swish"),
            layers.DepthwiseConv2D(2),
            layers.SeparableConv2D(2, 2, padding="same", pointwise_initializer="orthogonal"),
            layers.Conv2DTranspose(2, 2, 2, kernel_initializer=seeded()),
            layers.MaxPooling2D(2),
            layers.Cropping2D(((0, 1), (0, 1))),
            layers.GlobalAveragePooling2D(),
        ],
    ),
    "conv_1d": (
        "Convolutions and pooling over one dimension",
        rows(9, 2),
        lambda layers: [
            layers.ZeroPadding1D(1),
            layers.Conv1D(3, 3, activation="tanh"),
            layers.DepthwiseConv1D(2),
            layers.SeparableConv1D(2, 2),
            layers.Conv1DTranspose(2, 2),
            layers.Lambda(lambda x: keras.ops.relu(x) + x),
            layers.UpSampling1D(2),
            layers.MaxPooling1D(2),
            layers.AveragePooling1D(2),
        ],
        "layers.conv_2d",
    ),
    "conv_3d": (
        "Convolutions and pooling over three dimensions",
        rows(4, 4, 4, 1),
        lambda layers: [
            layers.Conv3D(2, 2, activation="tanh"),
            layers.Conv3DTranspose(2, 2),
            layers.AveragePooling3D(2),
            layers.GlobalMaxPooling3D(),
        ],
        "layers.conv_2d",
    ),
    "recurrent": (
        "Embedding with a mask, and recurrent layers",
        tokens(N),
        lambda layers: [
            layers.Embedding(VOCABULARY, 3, mask_zero=True),
            layers.LSTM(2, return_sequences=True),
            layers.TimeDistributed(layers.Dense(2)),
            layers.Bidirectional(layers.GRU(2)),
        ],
        "few_rows.masks_and_weights",
    ),
    "preprocessing": (
        "Preprocessing layers, inside of the model",
        rows(5, 5, 1),
        lambda layers: [
            layers.Rescaling(0.5, offset=0.1),
            layers.Resizing(6, 6),
            layers.CenterCrop(4, 4),
            layers.Discretization([-0.5, 0.0, 0.5]),
            layers.Flatten(),
            layers.CategoryEncoding(4, output_mode="multi_hot"),
        ],
        "layers.dense",
    ),
}


def family_case(name, title, x, layers, like=""):
    """A model of these layers and a dense one on top is the same under a strategy."""

    def build():
        inputs = keras.Input(x.shape[1:], dtype=x.dtype.name)
        outputs = inputs
        for layer in layers(keras.layers):
            outputs = layer(outputs)
        model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Flatten()(outputs)))
        return compiled(model, keras.optimizers.SGD(0.02), "mse", metrics=["mae"])

    def check(lab):
        model = lab.same(build, *trained(x, rows(1)), tolerance=NORMAL)
        # Two models that have diverged are equal, too.
        largest = max(float(np.max(np.abs(array))) for array in model.get_weights())
        lab.check(largest < 100, f"the weights should stay small, received {largest}")

    case("layers", name=name, title=title, like=like)(check)


for _name, _family in FAMILIES.items():
    family_case(_name, *_family)


@case("layers", replicas=(2,))
def own_loop(lab):
    """A custom loop with a convolution: `strategy.run`, gradients, `optimizer.apply`."""

    def build():
        layers = [keras.layers.Conv2D(2, 3), keras.layers.Flatten(), keras.layers.Dense(1)]
        return keras.Sequential([keras.Input((6, 6, 1)), *layers])

    loop, batches = Loop(build=build), [(rows(6, 6, 1)[:4], rows(1)[:4])]
    expected = loop.plain(batches)
    lab.equal(expected, loop.under(kd.MirroredStrategy(["cpu:0", "cpu:1"]), batches))
