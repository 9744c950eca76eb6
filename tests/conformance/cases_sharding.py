"""What only sharded state has: the parts that devices hold, initial values, refusals."""

import math
import re
import warnings
from unittest import mock

import numpy as np

from tests.conformance.actions import fit, predict
from tests.conformance.compare import ADAPTIVE
from tests.conformance.lab import fresh
from tests.conformance.lazy import kd, keras
from tests.conformance.models import compiled, dense, regression, stack
from tests.conformance.registry import case

TOPIC = "sharding"
_NONE = ("UnsupportedError", "Expected one device per process.*Received: .*kerasdist run")
_ON_TENSORFLOW = ("UnsupportedError", "Expected sharding=None.*Received: .*KERAS_BACKEND=jax")
REFUSED = {"tensorflow": _ON_TENSORFLOW, "torch": _NONE}


def even():
    """Every weight can be divided by 2 and by 4; Adam has two slots for each."""
    layers = keras.layers
    return stack(
        [
            layers.Dense(8, activation="tanh", name="up"),
            layers.Dense(4, activation="tanh", name="down"),
            layers.Dense(4, name="last"),
        ],
        keras.optimizers.Adam(0.01),
    )


def part(variable):
    value = variable._value
    if keras.backend.backend() == "torch":
        return value.numel() / math.prod(variable.shape)
    return math.prod(value.sharding.shard_shape(value.shape)) / math.prod(value.shape)


def parts(variables):
    return {part(one) for one in variables if tuple(one.shape)}


def parts_of(variables, replicas, replica):
    """What `parts` is on a replica: blocks of equal size, of which the last ones hold the rest."""
    sizes = [math.prod(one.shape) for one in variables if tuple(one.shape)]
    blocks = [(size, -(-size // replicas)) for size in sizes]
    return {min(block, max(0, size - replica * block)) / size for size, block in blocks}


def each_holds(lab, state, of_weights):
    """Each device holds its part, and trains to what one device trains to."""
    x, y = regression(9, outputs=4)
    own = 1 / lab.replicas
    strategy = lab.strategy(sharding=kd.Sharding(state, min_size=1))
    fresh()
    with strategy.scope():
        model = even()
        model.optimizer.build(model.trainable_variables)
    lab.equal({of_weights}, parts(model.weights))
    lab.equal({own}, parts(model.optimizer.variables))
    same = lab.same(
        even,
        fit(x, y, batch_size=4, epochs=2),
        predict(x),
        strategy=strategy,
        tolerance=ADAPTIVE,
        plain_key="divided",
    )
    lab.equal({of_weights}, parts(same.weights))
    lab.equal({own}, parts(same.optimizer.variables))
    same.set_weights(same.get_weights())
    lab.equal({of_weights}, parts(same.weights))


@case(TOPIC, replicas=(2, 4), refused=REFUSED)
def each_holds_its_slots(lab):
    """`sharding="optimizer"`: each device holds its part of the optimizer's variables."""
    each_holds(lab, "optimizer", 1.0)


@case(TOPIC, replicas=(2, 4), refused=REFUSED)
def each_holds_its_part(lab):
    """`sharding="full"`: from the first moment on, each holds its part of weights and slots."""
    each_holds(lab, "full", 1 / lab.replicas)


def mapped():
    """A model whose class has a map, as KerasHub's backbones do."""

    class Mapped(keras.Sequential):
        @staticmethod
        def get_layout_map(device_mesh):
            layouts = keras.distribution.LayoutMap(device_mesh)
            layouts["mapped/up.kernel"] = ("batch", "model")
            layouts["mapped/down.kernel"] = ("model", "batch")
            layouts["mapped/down.bias"] = ("model",)
            return layouts

    up, down, last = (
        keras.layers.Dense(units, activation="tanh", name=name)
        for units, name in ((12, "up"), (6, "down"), (4, "last"))
    )
    model = Mapped([keras.Input((4,)), up, down, last], name="mapped")
    return compiled(model, keras.optimizers.Adam(0.01), "mse")


@case(TOPIC, replicas=(2, 3), refused=REFUSED)
def chosen_by_rule(lab):
    """`sharding="auto"`: by the map of the model's class, else by the largest dimension."""
    x, y = regression(9, outputs=4)
    count = lab.replicas
    strategy = lab.strategy(sharding=kd.Sharding("auto", min_size=5))
    actions = fit(x, y, batch_size=4, epochs=2), predict(x)
    model = lab.same(mapped, *actions, strategy=strategy, tolerance=ADAPTIVE, plain_key="mapped")
    described = kd.describe_layout(model)
    found = {path.removeprefix("mapped/"): (how, why) for path, _, how, why, _ in described.rows}
    largest = f"largest dimension that {count} divides"
    by_map = ("(replica, None)", "key mapped/up.kernel of Mapped")
    expected = {
        "up/kernel": by_map if count == 2 else ("(None, replica)", largest),
        "up/bias": ("(replica)", largest),
        "down/kernel": ("(None, replica)", "key mapped/down.kernel of Mapped"),
        "down/bias": ("(replica)", largest),
        "last/kernel": ("(replica, None)", largest),
        "last/bias": ("whole", "fewer than 5 elements"),
        "adam/mapped_down_kernel_momentum": ("(None, replica)", "key mapped/down.kernel of Mapped"),
    }
    lab.equal(expected, {name: found[name] for name in expected})
    lab.equal({1 / count}, parts(model.weights[:-1]))

    def plain():
        layers = [keras.Input((6,)), keras.layers.Dense(12, name="up")]
        return keras.Sequential(layers, name="mapped")

    # A map of a class that comes later changes nothing of the weights that there are.
    strategy = lab.strategy(sharding=kd.Sharding("auto", min_size=5))
    with strategy.scope():
        models = plain(), mapped(), plain()
    found = [kd.describe_layout(one).rows[0][2] for one in models[::2]]
    lab.equal(["(None, replica)", "(replica, None)"], found)


@case(TOPIC, replicas=(2,), refused=REFUSED)
def small_variables_stay_whole(lab):
    """`min_size`, and a dimension that the replicas can divide: others stay whole."""
    strategy = lab.strategy(sharding=kd.Sharding("full", min_size=9))
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(8), keras.layers.Dense(3)])
        odd = keras.Variable(np.ones((5, 7)), name="odd")
    lab.equal([0.5, 1.0, 0.5, 1.0], [part(one) for one in model.weights])
    lab.equal(1.0, part(odd))
    described = kd.describe_layout(model)
    lab.equal([48, 32, 48, 12], [held for *_, held in described.rows])
    lab.equal(("(None, replica)", "largest dimension that 2 divides"), described.rows[0][2:4])
    lab.equal(("whole", "fewer than 9 elements"), described.rows[1][2:4])
    lab.equal(("whole", "2 divides no dimension"), strategy.replica_set.held(odd)[:2])
    lab.check("140 B of 236 B per device" in str(described), str(described))
    with lab.raises(ValueError, "Expected a built model"):
        kd.describe_layout(keras.Sequential([keras.layers.Dense(1)]))
    model = lab.made(dense, sharding="full")
    lab.equal({1.0}, parts(model.weights))


@case(TOPIC, replicas=(2,), refused=REFUSED)
def drawn_as_on_one_device(lab):
    """Initial values are those of one device, also by an initializer with a generator."""
    initializers = keras.initializers

    def variables():
        fresh()
        generator = keras.random.SeedGenerator(3)
        drawing = [
            "glorot_uniform",
            "orthogonal",
            "zeros",
            initializers.Constant(0.5),
            initializers.RandomNormal(seed=generator),
            initializers.TruncatedNormal(seed=generator),
            lambda shape, dtype: np.arange(64, dtype=dtype).reshape(shape),
        ]
        made = [keras.Variable(one, shape=(8, 8), dtype="float32") for one in drawing]
        return made, generator.state

    expected, state = variables()
    with lab.strategy(sharding=kd.Sharding("full", min_size=1)).scope():
        actual, own_state = variables()
    lab.equal({0.5}, parts(actual))
    lab.equal([np.array(one) for one in expected], [np.array(one) for one in actual])
    lab.equal(np.array(state), np.array(own_state))


@case(TOPIC, replicas=(2,))
def wrong_values(lab):
    """Wrong values of `sharding=` are refused, with what was received."""
    for wrong in ("zero", 3, {"full": 1}):
        with lab.raises(ValueError, r"Expected sharding to be None.*Received: sharding="):
            lab.strategy(sharding=wrong)
    with lab.raises(ValueError, r"'optimizer', 'full', 'auto'\].*Received: state='weights'"):
        kd.Sharding("weights")
    with lab.raises(ValueError, "Expected min_size.*Received: min_size=0"):
        kd.Sharding("full", min_size=0)
    with lab.raises(ValueError, "Expected within.*Received: within=.rack"):
        kd.Sharding("full", within="rack")


UNITS, DEEP = 128, 12


def of_many_kinds():
    """Layers that read weights in loops, casts, products and again going backward."""
    layers = keras.layers
    with keras.RematScope("full"):
        done_again = layers.Dense(8, activation="tanh", name="again")
    return stack(
        [
            layers.Bidirectional(layers.LSTM(4, return_sequences=True, name="recurrent")),
            layers.Conv1D(8, 2, padding="same", activation="tanh", name="convolution"),
            layers.BatchNormalization(name="normalized"),
            done_again,
            layers.Dense(8, lora_rank=2, kernel_regularizer="l2", name="low_rank"),
            layers.GlobalAveragePooling1D(),
            layers.Dense(4, name="last"),
        ],
        keras.optimizers.Adam(0.01),
        inputs=(6, 4),
    )


@case(TOPIC, backends=("jax",), replicas=(2,))
def gathered_for_each_use(lab):
    """`sharding="full"`: a step gathers weights going forward and again going backward."""
    from kerasdist.backends.jax import ahead_of_time
    from kerasdist.backends.jax.mesh import gathers

    strategy = lab.strategy(sharding=kd.Sharding("full", min_size=1))
    x, y = np.random.default_rng(0).normal(size=(8, 6, 4)), regression(8, outputs=4)[1]
    with mock.patch.object(gathers, "GROUP_BYTES", 1):  # each weight is a group
        actions = fit(x, y, batch_size=4, epochs=2), predict(x)
        lab.same(of_many_kinds, *actions, strategy=strategy, tolerance=ADAPTIVE)
        fresh()
        with strategy.scope():
            hidden = [keras.layers.Dense(UNITS, "tanh", use_bias=False) for _ in range(DEEP)]
            model = keras.Sequential([keras.Input((UNITS,)), *hidden])
            model.compile("sgd", "mse")
            model.optimizer.build(model.trainable_variables)
        layout = strategy.replica_set.arrays.layout
        batch = np.zeros((4, UNITS), "float32")
        program = ahead_of_time.training_program(model, (batch, batch), layout)
    made = program.lowered.compile()
    # Not again: of the last layer, which comes next going backward; the first needs none there.
    lab.equal(2 * DEEP - 2, made.as_text().count(" all-gather("))
    weight = 4 * UNITS**2
    most = DEEP // lab.replicas + 4  # shards of gradients, and what is whole
    found = made.memory_analysis().temp_size_in_bytes / weight
    lab.check(found < most, f"{found} weights are whole at a time, expected at most {most}")


@case(TOPIC, backends=("jax",), replicas=(2,))
def unpacked_for_each_use(lab):
    """Of a model in int4, with adapters, a step unpacks few weights at a time."""
    from kerasdist.backends.jax import ahead_of_time
    from kerasdist.backends.jax.mesh import gathers

    strategy = lab.strategy(sharding=kd.Sharding("full", min_size=UNITS))
    with strategy.scope(), mock.patch.object(gathers, "GROUP_BYTES", 1):
        hidden = [keras.layers.Dense(UNITS, "tanh", use_bias=False) for _ in range(DEEP)]
        model = keras.Sequential([keras.Input((UNITS,)), *hidden])
        model.quantize(config=keras.quantizers.Int4QuantizationConfig(block_size=16))
        for layer in hidden:
            layer.enable_lora(1)
        model.compile("sgd", "mse")
        model.optimizer.build(model.trainable_variables)
        layout, batch = strategy.replica_set.arrays.layout, np.zeros((4, UNITS), "float32")
        program = ahead_of_time.training_program(model, (batch, batch), layout)
    # A weight takes a byte once it is unpacked, four once it is a float.
    found = program.lowered.compile().memory_analysis().temp_size_in_bytes / UNITS**2
    lab.check(found < DEEP, f"{found} bytes of each weight of a layer, of {DEEP} layers")


@case(TOPIC, backends=("jax",), replicas=(3,))
def little_is_divided(lab):
    """A number of replicas that divides little: a warning says which share of the bytes it is."""
    x, y = regression(9, outputs=4)
    model = lab.made(even, sharding=kd.Sharding("full", min_size=1))
    with warnings.catch_warnings(record=True, action="always") as told:
        model.fit(x, y, epochs=2, verbose=0)
        model.evaluate(x, y, verbose=0)
    found = [str(one.message) for one in told if "to divide most of a model" in str(one.message)]
    lab.equal(1, len(found))
    lab.check("3 replicas, which divide 0% of" in found[0], found[0])
    lab.check("'sequential/up/kernel' of shape (4, 8)" in found[0], found[0])


@case(TOPIC, backends=("jax", "torch"), replicas=(4,), refused={"torch": _NONE})
def layouts_of_outputs(lab):
    """A LayoutMap's key for a layer's output lays it out, as in Keras; a wrong one is refused."""
    x, y = regression(9, outputs=4)
    mesh = keras.distribution.DeviceMesh((2, 2), ("batch", "model"), lab.devices)

    def by(key):
        layouts = keras.distribution.LayoutMap(mesh)
        layouts[".*up/kernel"] = (None, "model")
        layouts[key] = ("batch", "model")
        return lab.strategy(sharding=layouts)

    strategy = by(".*/up/output")
    actions = fit(x, y, batch_size=4, epochs=2), predict(x)
    model = lab.same(
        even, *actions, strategy=strategy, tolerance=ADAPTIVE, plain_key="divided by a map"
    )
    from kerasdist.backends.jax import ahead_of_time

    layout, batch = strategy.replica_set.arrays.layout, np.zeros((4, 4), "float32")
    text = ahead_of_time.training_program(model, (batch, batch), layout).lowered.as_text()
    constraint = (
        r'sharding_constraint %\S+ <@\w+, \[{"replica"}, {"logical_model"}\]> : tensor<4x8xf32>'
    )
    lab.check(re.search(constraint, text) is not None, text)
    with by(".*/uq/output").scope():
        model = even()
    with lab.raises(ValueError, r"Received: key='.\*/uq/output'.*nearest paths are .*up/output"):
        model.fit(x, y, verbose=0)


@case(TOPIC, backends=("jax", "torch"), replicas=(4,), refused={"torch": _NONE})
def layout_map(lab):
    """`sharding=` with a LayoutMap: tensor parallelism over a mesh with a data and a model axis."""
    x, y = regression(9, outputs=4)
    mesh = keras.distribution.DeviceMesh((2, 2), ("batch", "model"), lab.devices)
    layouts = keras.distribution.LayoutMap(mesh)
    layouts[".*up/kernel"] = (None, "model")
    layouts[".*up/bias"] = ("model",)
    layouts[".*down/kernel"] = ("model", "batch")
    strategy = lab.strategy(sharding=layouts)
    lab.equal(2, strategy.num_replicas_in_sync)
    actions = fit(x, y, batch_size=4, epochs=2), predict(x)
    model = lab.same(
        even, *actions, strategy=strategy, tolerance=ADAPTIVE, plain_key="divided by a map"
    )
    lab.equal([0.5, 0.5, 0.25, 1.0, 1.0, 1.0], [part(one) for one in model.weights])
    slots = [part(one) for one in model.optimizer.variables if tuple(one.shape)]
    lab.equal([0.5] * 4 + [0.25] * 2 + [1.0] * 6, slots)
    rows = kd.describe_layout(model).rows
    lab.equal(("(model, replica)", "key .*down/kernel"), rows[2][2:4])
    lab.equal(("whole", "no key of the map"), rows[3][2:4])
    layouts[".*uq/kernel"] = (None, "model")
    with lab.raises(ValueError, r"Received: key='.\*uq/kernel'.*nearest paths are .*up/kernel"):
        model.predict(x, verbose=0)
    layouts[".*odd"] = ("model",)
    with strategy.scope(), lab.raises(ValueError, "for each axis.*Received: layout=.*odd"):
        keras.Variable("zeros", shape=(3,), name="odd")
    flat = keras.distribution.DeviceMesh((4,), ("model",), lab.devices)
    with lab.raises(ValueError, "first axis.*Received: sharding=LayoutMap"):
        lab.strategy(sharding=keras.distribution.LayoutMap(flat))
    with lab.raises(kd.errors.DeviceError, "the strategy's devices.*Received: sharding=LayoutMap"):
        kd.MirroredStrategy(lab.devices[:2], sharding=layouts)
    with lab.raises(kd.errors.DeviceError, "the strategy's devices.*Received: sharding=LayoutMap"):
        kd.MirroredStrategy(lab.devices[:1], sharding=layouts)
