"""Each kind of layer that has weights under each optimizer, with sharded state (`sharding=`)."""

import numpy as np

from tests.conformance.actions import fit
from tests.conformance.double import FLOAT64, double_precision
from tests.conformance.lazy import keras
from tests.conformance.models import compiled
from tests.conformance.registry import case
from tests.multiprocess.cases_sharded_state import divides_weights

N, BATCH = 6, 3
RANDOM = np.random.default_rng(0)
IMAGES, IDS = RANDOM.normal(size=(N, 4, 4, 2)), np.arange(2 * N).reshape(N, 2) % 7
Y = IMAGES.sum((1, 2, 3))[:, None]


def of_image():
    yield from (keras.layers.Conv2D(3, 2), keras.layers.Conv2DTranspose(2, 2))
    yield from (keras.layers.SeparableConv2D(3, 2), keras.layers.DepthwiseConv2D(2))
    yield from (keras.layers.GroupNormalization(2), keras.layers.PReLU(shared_axes=[1, 2]))
    yield keras.layers.BatchNormalization()


def of_sequence():
    """With column-major kernels: `orthogonal`, the initializer of all that recur."""
    layers = keras.layers
    cells = [layers.LSTMCell(3), layers.GRUCell(4)]
    yield from (layers.SimpleRNN(5), layers.LSTM(3), layers.GRU(5), layers.RNN(cells))
    yield layers.Bidirectional(layers.GRU(3))
    yield from (layers.Conv1D(3, 2), layers.Conv1DTranspose(3, 2))
    yield from (layers.SeparableConv1D(3, 2), layers.DepthwiseConv1D(2))
    yield layers.TimeDistributed(layers.Dense(3))
    yield layers.EinsumDense("abc,cd->abd", (4, 3), bias_axes="d")


def of_row(more):
    layers = keras.layers
    transposed = lambda shape, dtype=None: keras.ops.transpose(  # noqa: E731
        keras.random.normal(shape[::-1], dtype=dtype, seed=3)
    )
    yield layers.Dense(5, kernel_initializer="orthogonal")
    yield layers.Dense(5, kernel_initializer=transposed)
    yield from (layers.LayerNormalization(), layers.RMSNormalization(), layers.PReLU())
    yield from more


def every_layer(optimizer, more):
    """All in one model, side by side; attention has no biases, whose gradients are rounding."""
    image, ids = keras.Input((4, 4, 2)), keras.Input((2,), dtype="int32")
    sequence, video = keras.layers.Reshape((4, 8))(image), keras.layers.Reshape((2, 4, 4, 1))(image)
    row = keras.layers.Flatten()(image)
    outputs = [
        keras.layers.Embedding(7, 3)(ids),
        keras.layers.MultiHeadAttention(2, 3, use_bias=False)(sequence, sequence),
        keras.layers.GroupQueryAttention(3, 4, 2, use_bias=False)(sequence, sequence),
        keras.layers.ConvLSTM2D(2, 2)(video),
        *(
            layer(video)
            for layer in (keras.layers.Conv3D(2, 2), keras.layers.Conv3DTranspose(2, 2))
        ),
        *(layer(image) for layer in of_image()),
        *(layer(sequence) for layer in of_sequence()),
        *(layer(row) for layer in of_row(more())),
    ]
    together = keras.layers.Concatenate()([keras.layers.Flatten()(one) for one in outputs])
    model = keras.Model([image, ids], keras.layers.Dense(1)(together))
    return compiled(model, optimizer, "mse")


def optimizers():
    of = keras.optimizers
    yield from (of.SGD(1e-3, momentum=0.9, nesterov=True), of.Adam(1e-3), of.AdamW(1e-3))
    yield from (of.Adamax(1e-3), of.Adagrad(1e-3), of.Adadelta(0.1), of.Adafactor(1e-3))
    yield from (of.Ftrl(1e-3), of.Nadam(1e-3), of.RMSprop(1e-3, momentum=0.5, centered=True))
    yield from (of.Lion(1e-4), of.Lamb(1e-3), of.Muon(1e-3, exclude_layers=["embedding"]))
    yield of.Adam(1e-3, amsgrad=True, use_ema=True, ema_overwrite_frequency=2, global_clipnorm=0.5)


@case("workers", backends=("torch",))
def with_each_optimizer(lab):
    """All kinds of layers with weights, under all optimizers, take two steps."""
    # It assigns to its kernel in a step, which is refused where workers divide weights.
    norm = lambda: [keras.layers.SpectralNormalization(keras.layers.Dense(3))]  # noqa: E731
    more = list if divides_weights(lab) else norm
    with double_precision(lab.backend):
        names = [type(one).__name__ for one in optimizers()]
        for place in range(len(names)):
            build = lambda place=place: every_layer(list(optimizers())[place], more)  # noqa: E731
            try:
                lab.same(
                    build, fit([IMAGES, IDS], Y, batch_size=BATCH, shuffle=False), tolerance=FLOAT64
                )
            except Exception as error:
                error.add_note(f"The optimizer is {names[place]}.")
                raise
