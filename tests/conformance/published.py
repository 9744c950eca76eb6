"""Models as keras.io's examples build them, at a size that tests can pay.

Each is deep for its width, with batch normalization after layers that have a bias: rounding grows
in them (docs/numerics.md, "How rounding grows").
"""

import numpy as np

from tests.conformance.lazy import keras


def siamese():
    """Two towers, batch normalization of the distance between them (siamese_contrastive)."""
    layers, ops = keras.layers, keras.ops

    def distance(towers):
        squares = ops.sum(ops.square(towers[0] - towers[1]), axis=1, keepdims=True)
        return ops.sqrt(ops.maximum(squares, keras.backend.epsilon()))

    def contrastive(y_true, y_pred):
        far = ops.square(ops.maximum(1 - y_pred, 0))
        return ops.mean((1 - y_true) * ops.square(y_pred) + y_true * far)

    image = x = keras.Input((12, 12, 1))
    x = layers.BatchNormalization()(x)
    x = layers.Conv2D(3, 3, activation="tanh")(x)
    x = layers.AveragePooling2D(2)(x)
    x = layers.Conv2D(5, 3, activation="tanh")(x)
    x = layers.AveragePooling2D(2)(x)
    x = layers.BatchNormalization()(layers.Flatten()(x))
    tower = keras.Model(image, layers.Dense(4, activation="tanh")(x))
    pair = keras.Input((12, 12, 1)), keras.Input((12, 12, 1))
    x = layers.Lambda(distance, output_shape=(1,))([tower(one) for one in pair])
    x = layers.BatchNormalization()(x)
    model = keras.Model(pair, layers.Dense(1, activation="sigmoid")(x))
    model.compile("RMSprop", contrastive, metrics=["accuracy"])
    return model


def siamese_data(n):
    random = np.random.default_rng(0)
    images = random.uniform(0, 255, size=(2, n, 12, 12, 1))
    return tuple(images), random.integers(0, 2, size=n).astype("float64")


def u_net():
    """Separable and transposed convolutions with residuals (oxford_pets_image_segmentation)."""
    layers = keras.layers
    image = keras.Input((16, 16, 3))
    x = layers.Conv2D(4, 3, strides=2, padding="same")(image)
    x = previous = layers.ReLU()(layers.BatchNormalization()(x))
    for filters in (6,):
        for _ in range(2):
            x = layers.SeparableConv2D(filters, 3, padding="same")(layers.ReLU()(x))
            x = layers.BatchNormalization()(x)
        x = layers.MaxPooling2D(3, strides=2, padding="same")(x)
        residual = layers.Conv2D(filters, 1, strides=2, padding="same")(previous)
        x = previous = layers.add([x, residual])
    for filters in (6, 4):
        for _ in range(2):
            x = layers.Conv2DTranspose(filters, 3, padding="same")(layers.ReLU()(x))
            x = layers.BatchNormalization()(x)
        x = layers.UpSampling2D(2)(x)
        residual = layers.Conv2D(filters, 1, padding="same")(layers.UpSampling2D(2)(previous))
        x = previous = layers.add([x, residual])
    model = keras.Model(image, layers.Conv2D(3, 3, activation="softmax", padding="same")(x))
    # The example's loss is the sparse one, which torch refuses to differentiate here, of plain
    # Keras's model too ("grad_input must be contiguous").
    model.compile(keras.optimizers.Adam(1e-3), "categorical_crossentropy")
    return model


def u_net_data(n):
    random = np.random.default_rng(1)
    images = random.uniform(0, 255, size=(n, 16, 16, 3))
    return images, np.eye(3)[random.integers(0, 3, size=(n, 16, 16))]


def point_net(points=9, pooled="Max"):
    """Point clouds, transformed by learned matrices that a penalty keeps orthogonal."""
    layers, ops = keras.layers, keras.ops

    class Orthogonal(keras.regularizers.Regularizer):
        def __init__(self, features):
            self.features = features

        def __call__(self, x):
            x = ops.reshape(x, (-1, self.features, self.features))
            products = ops.tensordot(x, x, axes=(2, 2))
            products = ops.reshape(products, (-1, self.features, self.features))
            return ops.sum(1e-3 * ops.square(products - ops.eye(self.features)))

    def normalized(layer, x):
        return layers.ReLU()(layers.BatchNormalization(momentum=0.0)(layer(x)))

    def convolved(x, filters):
        return normalized(layers.Conv1D(filters, 1), x)

    def transformed(inputs, features):
        x = convolved(convolved(inputs, 4), 6)
        x = normalized(layers.Dense(5), getattr(layers, f"Global{pooled}Pooling1D")()(x))
        x = layers.Dense(
            features * features,
            kernel_initializer="zeros",
            bias_initializer=keras.initializers.Constant(np.eye(features).flatten()),
            activity_regularizer=Orthogonal(features),
        )(x)
        return layers.Dot(axes=(2, 1))([inputs, layers.Reshape((features, features))(x)])

    cloud = keras.Input((points, 3))
    first = convolved(transformed(cloud, 3), 4)
    second = convolved(first, 5)
    third = convolved(transformed(second, 5), 8)
    whole = getattr(layers, f"{pooled}Pooling1D")(points)(third)
    whole = layers.Lambda(lambda x: ops.tile(x, (1, points, 1)), (points, 8))(whole)
    x = layers.Concatenate()([first, second, third, whole])
    x = layers.Conv1D(4, 1, activation="softmax")(convolved(x, 6))
    model = keras.Model(cloud, x)
    model.compile(keras.optimizers.Adam(1e-3), "categorical_crossentropy", metrics=["accuracy"])
    return model


def point_net_data(n, points=9):
    random = np.random.default_rng(2)
    labels = random.integers(0, 4, size=(n, points))
    return random.normal(size=(n, points, 3)), np.eye(4)[labels]
