"""Kinds of models: what is built, not how it is trained."""

import gc
import weakref

import numpy as np

from tests.conformance.actions import evaluate, fit, predict, used
from tests.conformance.lazy import kd, keras, tf, torch
from tests.conformance.models import dense, regression
from tests.conformance.registry import REPLICAS, case

N, BATCH = 11, 6
X, Y = regression(N)


def compiled(model, **options):
    model.compile(keras.optimizers.SGD(0.1), options.pop("loss", "mse"), metrics=["mae"], **options)
    return model


@case("models", replicas=REPLICAS)
def really_distributed(lab):
    """The model's batch is split: no case passes because one device did all the work."""
    seen = set()

    def build():
        class Spy(keras.layers.Layer):
            def call(self, x):
                if not kd.in_cross_replica_context():
                    seen.add(kd.get_replica_context().replica_id_in_sync_group)
                return x

        return compiled(keras.Sequential([keras.Input((4,)), Spy(), keras.layers.Dense(1)]))

    x, y = regression(4 * lab.replicas)
    model = lab.same(
        build, fit(x, y, batch_size=2 * lab.replicas, shuffle=False), share_plain=False
    )
    if lab.backend == "jax":
        devices = {device.id for device in model.weights[0].value.sharding.device_set}
        lab.equal(lab.replicas, len(devices))
    elif lab.backend == "torch":
        lab.equal(list(range(lab.replicas)), sorted(int(index) for index in seen))
    else:
        lab.check(
            isinstance(model.weights[0].value, tf.distribute.DistributedValues)
            or len({str(index) for index in seen}) >= lab.replicas,
            f"expected {lab.replicas} replicas at work, saw {seen}",
        )


@case("models", like="models.subclassed_model")
def functional_with_branches(lab):
    """Branches, a shared layer; inputs and outputs as dicts, of several dtypes and ranks."""
    random = np.random.default_rng(0)
    data = {
        "a": X,
        "b": X[::-1].copy(),
        "ids": random.integers(0, 7, size=(N, 1)).astype("int32"),
        "image": random.integers(0, 255, size=(N, 4, 4, 1)).astype("uint8"),
    }

    def build():
        layers = keras.layers
        inputs = {
            name: keras.Input(array.shape[1:], dtype=array.dtype.name, name=name)
            for name, array in data.items()
        }
        shared = layers.Dense(5, activation="tanh")
        image = layers.Flatten()(layers.Rescaling(1 / 255)(inputs["image"]))
        words = layers.Flatten()(layers.Embedding(7, 3)(inputs["ids"]))
        parts = [shared(inputs["a"]), shared(inputs["b"]), words, image]
        outputs = {"sum": layers.Dense(1, name="sum")(layers.Concatenate()(parts))}
        return compiled(keras.Model(inputs, outputs), loss={"sum": "mse"})

    lab.same(build, fit(data, {"sum": Y}, batch_size=BATCH), predict(data, batch_size=4))


def subclassed():
    class Net(keras.Model):
        def __init__(self):
            super().__init__()
            self.hidden = keras.layers.Dense(5, activation="tanh")
            self.out = keras.layers.Dense(1)

        def call(self, x, training=False):
            hidden = self.hidden(x)
            return self.out(hidden * 0.5 if training else hidden)

    return Net()


@case("models")
def subclassed_model(lab):
    """A subclassed model, built by its data, with a `training` argument."""
    lab.same(lambda: compiled(subclassed()), *used(X, Y, BATCH))


@case("models", like="models.subclassed_model")
def sequential_built_by_data(lab):
    """A Sequential without `Input`, with models inside: built by the first batch."""

    def build():
        inner = keras.Sequential([keras.layers.Dense(3, activation="tanh")])
        return compiled(keras.Sequential([keras.layers.Dense(5), inner, subclassed()]))

    lab.same(build, fit(X, Y, batch_size=BATCH), predict(X, batch_size=4))


@case("models")
def frozen_layers(lab):
    """A frozen layer keeps its weights; a model of which nothing is trained evaluates."""

    def build():
        frozen = keras.layers.Dense(5, trainable=False)
        return compiled(keras.Sequential([keras.Input((4,)), frozen, keras.layers.Dense(1)]))

    def freeze(model):
        model.trainable = False
        compiled(model)

    evaluated = evaluate(X, Y, batch_size=BATCH), predict(X, batch_size=BATCH)
    lab.same(build, fit(X, Y, batch_size=BATCH), freeze, *evaluated)


@case("models")
def sublayer_that_is_never_called(lab):
    """A layer that is made and not called: fit, evaluate, predict."""

    def build():
        class Residual(keras.layers.Layer):
            def __init__(self, units):
                super().__init__()
                self.dense = keras.layers.Dense(units)
                self.projection = keras.layers.Dense(units)

            def call(self, x):
                changed = self.dense(x)
                return changed + (x if changed.shape == x.shape else self.projection(x))

        return compiled(keras.Sequential([Residual(4), keras.layers.Dense(1)]))

    lab.same(build, *used(X, Y, BATCH), predict(X, batch_size=BATCH))


@case("models", replicas=(2, 3))
def tensors_that_layers_keep(lab):
    """Tensors kept as attributes, and read after BatchNormalization, an update or a metric."""

    class Residual(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(4, use_bias=False)
            self.normalization = keras.layers.BatchNormalization()

        def call(self, x, training=None):
            self.kept = [x]
            changed = self.normalization(self.dense(x), training=training)
            self.kept.append(changed)
            return sum(self.kept)

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.blocks = [Residual(), Residual()]
            self.last = keras.layers.Dense(1)
            self.size = keras.metrics.Mean(name="size")

        def call(self, x, training=None):
            self.latent = x
            for block in self.blocks:
                self.latent = block(self.latent, training=training)
            return self.last(self.blocks[0](self.latent, training=training))

        def compute_loss(self, *args, **kwargs):
            added = keras.ops.mean(keras.ops.square(self.latent))
            return super().compute_loss(*args, **kwargs) + 0.1 * added

        def compute_metrics(self, x, y, y_pred, sample_weight=None):
            super().compute_metrics(x, y, y_pred, sample_weight)
            if lab.backend != "jax":  # which has left the function that it differentiates
                self.size.update_state(self.latent)
            return self.get_metrics_result()

    lab.same(lambda: compiled(Model()), *used(X, Y, BATCH))


@case("models")
def state_that_layers_write(lab):
    """A layer that counts examples in a variable of its own (`aggregation="sum"`)."""

    def build():
        class Counter(keras.layers.Layer):
            def build(self, shape):
                self.count = self.add_weight(
                    shape=(), initializer="zeros", trainable=False, aggregation="sum", name="count"
                )

            def call(self, x, training=False):
                if training:
                    ones = keras.ops.ones_like(x[:, 0])
                    self.count.assign(self.count + keras.ops.sum(ones))
                return x

        return compiled(keras.Sequential([keras.Input((4,)), Counter(), keras.layers.Dense(1)]))

    lab.same(build, fit(X, Y, batch_size=BATCH, epochs=2))


@case("models")
def preprocessing_layers(lab):
    """`Normalization` adapted before and inside the scope."""

    def build():
        normal = keras.layers.Normalization()
        normal.adapt(X)
        return compiled(keras.Sequential([keras.Input((4,)), normal, keras.layers.Dense(1)]))

    lab.same(build, fit(X, Y, batch_size=BATCH))


@case("models")
def one_device_strategy(lab):
    """`kd.OneDeviceStrategy` and `kd.auto()` train as plain Keras does."""
    first = lab.devices[0]
    for strategy in (kd.OneDeviceStrategy(first), kd.auto()):
        lab.same(dense, *used(X, Y, BATCH), strategy=strategy, plain_key="one device")
    lab.equal(1, kd.OneDeviceStrategy(first).num_replicas_in_sync)


@case("models", backends=("torch",))
def sparse_gradients_of_a_torch_module(lab):
    """`torch.nn.Embedding(sparse=True)`."""
    x, y = np.arange(22).reshape(11, 2) % 10, np.ones((11, 2, 1), "float32")

    class Embedding(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.nn.Embedding(10, 3, sparse=True)

        def forward(self, ids):
            return self.table(ids.long())

    def build():
        embedding = keras.layers.TorchModuleWrapper(Embedding())
        inputs = keras.Input((2,), dtype="int32")
        model = keras.Sequential([inputs, embedding, keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
        return model

    lab.same(build, fit(x, y, batch_size=4, shuffle=False, epochs=2))


@case("models", replicas=(2,))
def a_users_class_goes_with_its_last_model(lab):
    """A user's class is freed with its last model, as in plain Keras."""

    def used():
        class Own(keras.Model):
            def __init__(self):
                super().__init__()
                self.dense = keras.layers.Dense(1)

            def call(self, x):
                return self.dense(x)

        model = lab.made(lambda: compiled(Own()))
        model.fit(*regression(4), verbose=0)
        return weakref.ref(Own), weakref.ref(type(model)), weakref.ref(model)

    references = used()
    keras.utils.clear_session(free_memory=False)
    gc.collect()
    lab.equal([None] * 3, [one() for one in references])
