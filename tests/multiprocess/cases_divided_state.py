"""State that workers divide (`sharding=`): what they hold, and models that gather in special ways.

The cases of the exactness suite run over it too (`Layout.sharding`).
"""

import numpy as np

from tests.conformance.actions import fit, predict
from tests.conformance.compare import ADAPTIVE
from tests.conformance.double import FLOAT64, double_precision
from tests.conformance.lab import fresh
from tests.conformance.lazy import kd, keras
from tests.conformance.models import dense, regression
from tests.conformance.registry import case

TOPIC = "sharding"
TORCH = ("torch",)
STATES = ("optimizer", "full")


def strategy_of(lab, state, min_size=1):
    return lab.strategy(sharding=kd.Sharding(state, min_size=min_size))


def same(lab, build, *actions, states=STATES, **options):
    """On one device, and with each way to divide."""
    for state in states:
        lab.same(
            build, *actions, strategy=strategy_of(lab, state), plain_key=build.__name__, **options
        )


def held(variables):
    """How many elements this worker holds."""
    return sum(one._value.numel() for one in variables)


def wide(units=8, features=4):
    layers = [keras.layers.Dense(units, "tanh"), keras.layers.Dense(units, "tanh")]
    model = keras.Sequential([keras.Input((features,)), *layers, keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.01), "mse")
    return model


@case(TOPIC, backends=TORCH)
def each_worker_holds_its_part(lab):
    """From the first moment on each worker holds its part of weights and slots, gradients none."""
    x, y = regression(8)
    for state, of_weights in (("optimizer", 1), ("full", lab.replicas)):
        with strategy_of(lab, state).scope():
            model = wide()
            weights = sum(-(-one._value.numel() // 1) for one in model.weights)
            model.optimizer.build(model.trainable_variables)
        total = model.count_params()
        slots = model.optimizer.variables[2:]  # without the rate and the number of steps
        lab.check(weights <= total / of_weights + 2 * lab.replicas, f"{weights} of {total}")
        # The last part of a variable may be shorter: bounds hold for each variable.
        most = sum(-(-int(np.prod(one.shape)) // lab.replicas) for one in slots)
        lab.check(held(slots) <= most, f"{held(slots)} of at most {most}")
        model.fit(x, y, batch_size=4, verbose=0)
        lab.check(held(slots) <= most, "the optimizer's variables have become whole")
        lab.check(
            sum(one.numel() for one in model.parameters()) == weights, "parameters became whole"
        )
        gradients = [one for one in model.parameters() if one.grad is not None]
        lab.check(not gradients, f"{len(gradients)} gradients are left")


@case(TOPIC, backends=TORCH)
def small_variables_stay_whole(lab):
    """`min_size`."""
    with strategy_of(lab, "full", min_size=9).scope():
        model = wide()
    whole = [one._value.shape == tuple(one.shape) for one in model.weights]
    lab.equal([False, True, False, True, True, True], whole)


@case(TOPIC, backends=TORCH)
def gathered_when_needed(lab):
    """A step of `fit` gathers each weight once forward and once backward, the last ones once."""
    from kerasdist.backends.torch.gathered import Leaf

    x, y = regression(8)
    with strategy_of(lab, "full", min_size=9).scope():
        layers = [keras.layers.Dense(8, "tanh") for _ in range(5)]
        model = keras.Sequential([keras.Input((4,)), *layers])
        model.compile("sgd", "mse")
    y = np.repeat(y, 8, 1)
    model.fit(x, y, batch_size=8, verbose=0)
    gathers, original = [], Leaf.gather

    def gather(leaf):
        gathers.append(leaf)
        original(leaf)

    Leaf.gather = gather
    try:
        model.fit(x, y, batch_size=8, verbose=0)
    finally:
        Leaf.gather = original
    # The last two are still there, and the first layer's input has no gradient.
    lab.equal(5 + 5 - 2 - 1, len(gathers))
    lab.check(not any(one.address for one in gathers), "weights are gathered after the step")


def recurrent():
    cells = [keras.layers.LSTMCell(3), keras.layers.GRUCell(3)]
    layers = [keras.layers.LSTM(4, return_sequences=True), keras.layers.RNN(cells)]
    model = keras.Sequential([keras.Input((5, 2)), *layers, keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.01), "mse")
    return model


@case(TOPIC, backends=TORCH)
def recurrent_layers(lab):
    """Layers that read weights at each time step, more of them than stay gathered."""
    x = np.random.default_rng(0).normal(size=(9, 5, 2)).astype("float32")
    actions = fit(x, x[:, 0, :1], batch_size=4, epochs=3), predict(x)
    same(lab, recurrent, *actions, tolerance=ADAPTIVE)


def computed_again():
    with keras.RematScope("full"):
        layers = [keras.layers.Dense(4, "tanh"), keras.layers.Dense(4, "tanh")]
        model = keras.Sequential([keras.Input((4,)), *layers, keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        return model


@case(TOPIC, backends=TORCH)
def remat(lab):
    """`RematScope`, whose layers read weights in the backward pass."""
    x, y = regression(9)
    same(lab, computed_again, fit(x, y, batch_size=4, epochs=2))


class Tied(keras.Model):
    def __init__(self):
        super().__init__()
        self.embedding = keras.layers.Embedding(6, 4)
        self.dense = keras.layers.Dense(4, kernel_regularizer="l2")

    def call(self, ids):
        hidden = self.dense(self.dense(self.embedding(ids)))
        return keras.ops.matmul(hidden, keras.ops.transpose(self.embedding.embeddings))


def tied():
    model = Tied()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True), loss)
    model(np.zeros((1, 3), "int32"))
    return model


@case(TOPIC, backends=TORCH)
def shared_and_tied_weights(lab):
    """Weights that a step reads several times: tied, in a shared layer, in a regularizer."""
    ids = np.random.default_rng(1).integers(0, 6, (9, 3)).astype("int32")
    same(lab, tied, fit(ids, ids, batch_size=4, epochs=2), predict(ids))


def frozen():
    model = wide()
    model.layers[0].trainable = False
    model.compile(keras.optimizers.Adam(0.01), "mse")
    return model


@case(TOPIC, backends=TORCH)
def frozen_and_unfrozen(lab):
    """Layers are frozen, trained beside, and trained again."""
    x, y = regression(9)

    def unfreeze(model):
        model.layers[0].trainable = True
        model.compile(keras.optimizers.Adam(0.01), "mse")
        return model.fit(x, y, batch_size=4, verbose=0)

    same(lab, frozen, fit(x, y, batch_size=4), unfreeze, tolerance=ADAPTIVE)


def adapted():
    model = wide()
    for layer in model.layers[:2]:
        layer.enable_lora(2)
    model.compile(keras.optimizers.Adam(0.01), "mse")
    return model


@case(TOPIC, backends=TORCH)
def lora(lab):
    """LoRA on divided weights, merged when saved."""
    x, y = regression(9)
    same(lab, adapted, fit(x, y, batch_size=4, epochs=2), predict(x), tolerance=ADAPTIVE)


@case(TOPIC, backends=TORCH)
def in_double(lab):
    """In float64 the numbers agree to 1e-11."""
    x, y = (one.astype("float64") for one in regression(9))
    with double_precision(lab.backend):
        same(lab, wide, fit(x, y, batch_size=4, epochs=2), tolerance=FLOAT64)


@case(TOPIC, backends=TORCH)
def saved_and_loaded(lab):
    """A model that is saved fits any `sharding`; all workers save, the chief writes."""
    x, y = regression(9)
    strategies = [strategy_of(lab, state) for state in STATES] + [lab.strategy()]
    with strategies[1].scope():
        model = wide()
    checkpoint = keras.callbacks.ModelCheckpoint
    with lab.folder() as folder:
        kept = checkpoint(folder / "kept.weights.h5", save_weights_only=True)
        model.fit(x, y, batch_size=4, verbose=0, callbacks=[kept])
        model.save(folder / "m.keras")
        expected, slots = model.get_weights(), [np.array(one) for one in model.optimizer.variables]
        lab.alike(expected)
        for strategy in strategies:
            with strategy.scope():
                loaded = keras.models.load_model(folder / "m.keras")
                again = wide()
            again.load_weights(folder / "kept.weights.h5")
            lab.equal([expected, slots], [loaded.get_weights(), list(loaded.optimizer.variables)])
            lab.equal(expected, again.get_weights())
        lab.everyone("read")


@case(TOPIC, backends=TORCH)
def restarts_with_another_sharding(lab):
    """A backup is restored with another `sharding`."""
    x, y = regression(12)
    options = {"batch_size": 4, "verbose": 0}

    def model_of(strategy):
        fresh()
        with strategy.scope():
            return wide()

    untouched = model_of(lab.strategy())
    untouched.fit(x, y, epochs=4, **options)
    for first, second in (("full", "optimizer"), ("optimizer", "full"), ("full", None)):
        with lab.folder() as folder:
            backup = lambda: kd.callbacks.BackupAndRestore(  # noqa: E731
                folder, delete_checkpoint=False
            )
            model_of(strategy_of(lab, first)).fit(x, y, epochs=2, callbacks=[backup()], **options)
            resumed = model_of(lab.strategy() if second is None else strategy_of(lab, second))
            resumed.fit(x, y, epochs=4, callbacks=[backup()], **options)
            lab.equal(untouched.get_weights(), resumed.get_weights(), ADAPTIVE)


class Assigning(keras.layers.Layer):
    def build(self, shape):
        self.scale = self.add_weight(shape=(4,), initializer="ones", name="scale")

    def call(self, x):
        self.scale.assign(self.scale * 0.5)
        return x * self.scale


@case(TOPIC, backends=TORCH)
def refusals(lab):
    """What divided state cannot have is refused, with what to use instead."""
    x, y = regression(8)
    strategy = strategy_of(lab, "full")
    with strategy.scope():
        model = dense()
        assigning = keras.Sequential([keras.Input((4,)), Assigning(), keras.layers.Dense(1)])
        assigning.compile("sgd", "mse")
    unsupported = kd.errors.UnsupportedError
    with lab.folder() as folder:
        for callback, pattern in (
            (keras.callbacks.BackupAndRestore(folder / "b.weights.h5"), "Use kerasdist.callbacks"),
            (keras.callbacks.TensorBoard(folder, histogram_freq=1), "histogram_freq=0"),
            (kd.callbacks.BroadcastGlobalVariables(), "load the weights on all workers"),
        ):
            with lab.raises(unsupported, pattern):
                model.fit(x, y, verbose=0, callbacks=[callback])
    with lab.raises(unsupported, "Expected only the optimizer.*min_size"):
        assigning.fit(x, y, verbose=0)
    lab.still_usable(strategy)
