"""A `keras.distribution.LayoutMap` over several workers: replicas of several devices."""

import numpy as np

from tests.conformance.actions import evaluate, fit, predict
from tests.conformance.cases_sharding import even, part, parts
from tests.conformance.compare import ADAPTIVE, BFLOAT16
from tests.conformance.lab import fresh, optimizer_values
from tests.conformance.lazy import kd, keras
from tests.conformance.models import compiled, regression, stack
from tests.conformance.registry import case
from tests.environment import find_orbax
from tests.multiprocess.cases_sharded_adapters import IDS, TRAIN, adapted, quantized, scope_of
from tests.multiprocess.cases_sharded_adapters import model as model_of_tokens
from tests.multiprocess.loops import same_loop

TORCH = ("torch",)
BACKENDS = ("jax", "torch")


def _shape(lab):
    """The mesh: on JAX a worker is a replica, on PyTorch two workers are, or all if odd."""
    workers = lab.job.num_workers
    if lab.backend == "torch":
        each = 2 if workers % 2 == 0 else workers
        return workers // each, each
    return workers, lab.replicas // workers


def _mesh(lab, shape):
    names = [f"cpu:{number}" for number in range(lab.replicas)]
    return keras.distribution.DeviceMesh(shape, ("batch", "model"), names)


def _map(lab, layouts, shape=None):
    made = keras.distribution.LayoutMap(_mesh(lab, shape or _shape(lab)))
    for key, axes in layouts.items():
        made[key] = axes
    return made


def _layouts(lab, shape=None):
    """The batch is divided over the replicas, weights over the devices of each."""
    layouts = {
        ".*up/kernel": (None, "model"),
        ".*up/bias": ("model",),
        ".*down/kernel": ("model", "batch" if _divides_all(lab) else None),
    }
    return _map(lab, layouts, shape)


def _divides_all(lab):
    return 4 % _shape(lab)[0] == 0


def _trained(lab, build, layouts, x, y, **options):
    """Two epochs by a map are those of one device; returns the model."""
    actions = fit(x, y, batch_size=4, epochs=2, shuffle=False), evaluate(x, y), predict(x)
    strategy = lab.strategy(sharding=_map(lab, layouts))
    return lab.same(build, *actions, strategy=strategy, **{"tolerance": ADAPTIVE} | options)


@case("workers", backends=BACKENDS)
def as_one_device(lab):
    """`fit`, `predict`, files and backups by a LayoutMap over the devices of all workers."""
    replicas, each = _shape(lab)
    if 8 % each:
        return
    x, y = regression(9, outputs=4)
    strategy = lab.strategy(sharding=_layouts(lab))
    lab.equal(replicas, strategy.num_replicas_in_sync)
    actions = fit(x, y, batch_size=4, epochs=2), predict(x)
    model = lab.same(even, *actions, strategy=strategy, tolerance=ADAPTIVE, plain_key="by a map")
    sharded = 1 / lab.replicas if _divides_all(lab) else 1 / each
    lab.equal([1 / each, 1 / each, sharded, 1.0, 1.0, 1.0], [part(one) for one in model.weights])
    slots = [part(one) for one in model.optimizer.variables if tuple(one.shape)]
    lab.equal([1 / each] * 4 + [sharded] * 2 + [1.0] * 6, slots)
    lab.alike(model.get_weights())
    if each > 1:
        _, _, layout, why, _ = kd.describe_layout(model).rows[0]
        lab.equal(("(None, model)", "key .*up/kernel"), (layout, why))
    with lab.folder() as folder:
        model.save(folder / "m.keras")
        whole = keras.models.load_model(folder / "m.keras")
        lab.equal(model.get_weights(), whole.get_weights())
        lab.equal(optimizer_values(model), optimizer_values(whole))
        model.save_weights(folder / "m.weights.h5")
        before = model.get_weights()
        model.set_weights([one + 1 for one in before])
        lab.equal([one + 1 for one in before], model.get_weights())
        model.load_weights(folder / "m.weights.h5")
        lab.equal(before, model.get_weights())
        kept = optimizer_values(model)
        find_orbax()
        kd.save_checkpoint(model, folder / "1")
        for other in (strategy, kd.OneDeviceStrategy("cpu:0")):
            fresh()
            with other.scope():
                read = even()
            kd.load_checkpoint(read, folder / "1")
            lab.equal([before, kept], [read.get_weights(), optimizer_values(read)])
        model.fit(x, y, batch_size=4, verbose=0, callbacks=[kd.callbacks.BackupAndRestore(folder)])
        lab.everyone("loaded")


@case("workers", backends=BACKENDS)
def custom_loop(lab):
    """`strategy.run` by a LayoutMap over the devices of all workers, beside one device."""
    _, each = _shape(lab)
    if 8 % each:
        return
    batches = [regression(8, outputs=4, seed=seed) for seed in range(3)]
    strategy = lab.strategy(sharding=_layouts(lab))
    model = same_loop(lab, even, batches, strategy, tolerance=ADAPTIVE)
    lab.check(each == 1 or 1 / each in parts(model.weights), f"whole: {parts(model.weights)}")


@case("workers", backends=("jax",))
def one_component_a_replica(lab):
    """A value has a component for each replica of a worker, not for each device."""
    strategy = lab.strategy(sharding=_layouts(lab))
    with strategy.scope():
        variable = keras.Variable([1.0, 2.0])

    def step():
        here = kd.get_replica_context()
        return here.replica_id_in_sync_group, here.all_reduce("SUM", variable.value)

    number, total = strategy.run(step)
    both = variable.value * lab.job.num_workers
    lab.equal([lab.job.rank], [int(one) for one in strategy.local_results(number)])
    equal = strategy.extended.reduce_to("SUM", total, variable)
    for value, expected in ((total, both), (equal, both * lab.job.num_workers)):
        components = strategy.local_results(value)
        lab.equal(1, len(components))
        lab.equal(expected, components[0])
    told = strategy.extended.broadcast_to(keras.ops.ones(3), variable)
    lab.equal(1, len(strategy.local_results(told)))
    new = strategy.extended.update(
        variable, lambda one, x: (x * 2.0, one.assign(x)), args=(equal,), group=False
    )
    lab.equal([(2, 2)], [tuple(map(len, one)) for one in map(tuple, new)])
    lab.equal(expected, variable.value)


@case("workers", backends=BACKENDS)
def refused(lab):
    """Devices in another order, maps that differ by worker, and what a backend's mesh cannot be."""
    shape = _shape(lab)
    if lab.backend == "jax":
        said = r"worker \d/.*all devices of its replicas.*Received: devices="
        with lab.raises(kd.errors.UnsupportedError, said):
            lab.strategy(sharding=_layouts(lab, (1, lab.replicas)))
    else:
        mesh = keras.distribution.DeviceMesh(
            (*shape, 1), ("batch", "model", "other"), [f"cpu:{one}" for one in range(lab.replicas)]
        )
        with lab.raises(kd.errors.UnsupportedError, "mesh of two axes.*Received: a mesh of"):
            lab.strategy(sharding=keras.distribution.LayoutMap(mesh))
    names = [f"cpu:{number}" for number in reversed(range(lab.replicas))]
    mesh = keras.distribution.DeviceMesh(shape, ("batch", "model"), names)
    with lab.raises(kd.errors.DeviceError, "order of the workers.*Received: sharding=LayoutMap"):
        lab.strategy(sharding=keras.distribution.LayoutMap(mesh))
    layouts = _layouts(lab)
    layouts[f".*of {lab.job.rank}"] = ("model",)
    said = r"same options of the strategy. Received: sharding=.*LayoutMap.*of \d.* on worker"
    with lab.raises(kd.errors.DisagreementError, said):
        lab.strategy(sharding=layouts)


@case("workers", backends=TORCH)
def bad_maps(lab):
    """An axis that does not divide, a key of no variable, and an assignment in a step."""
    x, y = regression(8, outputs=4)
    odd = lab.strategy(sharding=_map(lab, {".*kernel": (None, "model")}))
    with odd.scope():
        layer = keras.layers.Dense(7, name="odd")
        with lab.raises(ValueError, r"divides it evenly. Received: layout=.*variable 'odd/kernel'"):
            layer.build((None, 4))
    absent = lab.strategy(sharding=_map(lab, {"absent/kernel": (None, "model")}))
    with absent.scope():
        model = even()
    with lab.raises(ValueError, r"Received: key='absent/kernel', which fits no variable"):
        model.fit(x, y, verbose=0)
    nearest = r"Received: key='.\*uq/output'.*nearest paths are .*up/output"
    for key, axes, said in (
        (".*uq/output", ("batch", "model"), nearest),
        (".*up/output", ("batch", None, "model"), "layout=.*for '.*up/output' of shape="),
    ):
        with lab.strategy(sharding=_map(lab, {key: axes})).scope():
            model = even()
        with lab.raises(ValueError, said):
            model.fit(x, y, verbose=0)

    with lab.raises(kd.errors.UnsupportedError, "rows of one replica.*Received: a dataset"):
        absent.distribute_datasets_from_function(lambda context: [(x, y)])

    class Counts(keras.layers.Layer):
        def build(self, shape):
            self.total = self.add_weight(shape=shape[1:], trainable=False, name="tally")

        def call(self, inputs):
            self.total.assign(self.total + 1.0)
            return inputs

    strategy = lab.strategy(sharding=_map(lab, {".*tally": ("model",)}))
    if x.shape[1] % _shape(lab)[1]:
        return
    with strategy.scope():
        model = stack([Counts(), keras.layers.Dense(4)])
    with lab.raises(
        kd.errors.UnsupportedError, "variable='.*tally'. Leave it out of the LayoutMap"
    ):
        model.fit(x, y, verbose=0)


UP_DOWN = {
    ".*up/kernel": (None, "model"),
    ".*up/bias": ("model",),
    ".*down/kernel": ("model", "batch"),
    ".*last/kernel": ("batch", None),
}


def _by_pairs(lab):
    return lab.job.num_workers % 2 == 0


@case("workers", backends=TORCH)
def together(lab):
    """Norms over all shards, accumulated gradients and averaged weights, at once."""
    if not _by_pairs(lab):
        return

    def build():
        optimizer = keras.optimizers.Adam(
            0.01,
            global_clipnorm=0.1,
            gradient_accumulation_steps=2,
            use_ema=True,
            ema_overwrite_frequency=3,
        )
        model = even()
        return compiled(model, optimizer, "mse")

    _trained(lab, build, UP_DOWN, *regression(13, outputs=4))


@case("workers", backends=TORCH)
def own_train_step(lab):
    """A train_step that adds a penalty on divided weights, and reads gradients from the weights."""
    if not _by_pairs(lab):
        return

    class Own(keras.Sequential):
        def train_step(self, data):
            x, y = data
            self.zero_grad()
            y_pred = self(x, training=True)
            loss = self.compute_loss(x, y, y_pred)
            loss.backward()
            weights = self.trainable_weights
            gradients = [one.value.grad for one in weights]
            self.optimizer.apply(gradients, weights)
            return {"loss": loss}

    def build():
        penalty = keras.regularizers.L2(0.01)
        up = keras.layers.Dense(8, "tanh", name="up", kernel_regularizer=penalty)
        layers = [up, keras.layers.Dense(4, name="down"), keras.layers.Dense(4, name="last")]
        return compiled(Own([keras.Input((4,)), *layers]), keras.optimizers.Adam(0.01), "mse")

    _trained(lab, build, UP_DOWN, *regression(8, outputs=4))


@case("workers", backends=TORCH, like="together")
def updates(lab):
    """Other ways of clipping, loss scaling, penalties, and optimizers that mix elements."""
    if not _by_pairs(lab):
        return
    optimizers = keras.optimizers
    makers = (
        lambda: optimizers.Adam(0.01, clipnorm=0.1),
        lambda: optimizers.Adam(0.01, clipvalue=0.01),
        lambda: optimizers.LossScaleOptimizer(optimizers.AdamW(0.01)),
        lambda: optimizers.Lamb(0.01),
        lambda: optimizers.Muon(0.01),
    )
    for make in makers:

        def build():
            model = even()
            model.layers[0].kernel.regularizer = keras.regularizers.L2(0.01)
            return compiled(model, make(), "mse")  # noqa: B023

        _trained(lab, build, UP_DOWN, *regression(13, outputs=4))


def _of_many_layers():
    layers, inputs = keras.layers, keras.Input((6, 6, 3))
    x = layers.Conv2D(4, 3, name="by_outputs", padding="same", use_bias=False)(inputs)
    x = layers.BatchNormalization()(x)
    x = layers.Conv2D(8, 3, 2, activation="relu", name="by_inputs")(x)
    x = layers.Dropout(0.3)(layers.Reshape((4, 8))(x))
    ids = keras.Input((4,), dtype="int32")
    x = x + layers.Embedding(12, 8, name="table")(ids)
    x = layers.LayerNormalization()(x)
    x = x + layers.MultiHeadAttention(2, 4, use_bias=False, name="attention")(x, x)
    model = keras.Model([inputs, ids], layers.Dense(4)(layers.Flatten()(x)))
    return compiled(model, keras.optimizers.SGD(0.01, momentum=0.9), "mse")


OF_LAYERS = {
    ".*by_outputs/kernel": (None, None, None, "model"),
    ".*by_inputs/kernel": (None, None, "model", None),
    ".*table/embeddings": ("model", "batch"),
    ".*attention/(query|key|value)/kernel": ("batch", "model", None),
    ".*attention/attention_output/kernel": ("model", None, None),
}


@case("workers", backends=TORCH)
def layers(lab):
    """Convolutions, tables, attention, normalization, and dropout with equal draws in a replica."""
    if not _by_pairs(lab):
        return
    random = np.random.default_rng(0)
    images = random.normal(size=(9, 6, 6, 3)).astype("float32")
    x = [images, random.integers(0, 12, (9, 4)).astype("int32")]
    y = random.normal(size=(9, 4)).astype("float32")
    before = kd.config.draws()
    kd.config.set_draws("global")
    try:
        with lab.told("torch's DTensor has no rule") as told:
            model = _trained(lab, _of_many_layers, OF_LAYERS, x, y)
    finally:
        kd.config.set_draws(before)
    lab.check(any("convolution" in one for one in told), f"{told}")
    kernel = model.get_layer("by_outputs").kernel
    lab.equal(1 / _shape(lab)[1], part(kernel))


@case("workers", backends=TORCH, like="together")
def half_precision(lab):
    """A mixed policy, whose weights are shards of float32."""
    if not _by_pairs(lab):
        return

    def build():
        keras.config.set_dtype_policy("mixed_bfloat16")
        try:
            return even()
        finally:
            keras.config.set_dtype_policy("float32")

    _trained(lab, build, UP_DOWN, *regression(8, outputs=4), tolerance=BFLOAT16)


@case("workers", backends=TORCH)
def restarted(lab):
    """After a restart from a backup, the weights and slots are those without it, to the bit."""
    if not _by_pairs(lab):
        return
    x, y = regression(9, outputs=4)
    strategy = lab.strategy(sharding=_map(lab, UP_DOWN))
    found = []
    with lab.folder() as folder:
        for parts_of_run in ((2,), (1, 2)):
            for epochs in parts_of_run:
                fresh()
                with strategy.scope():
                    model = even()
                backups = []
                if len(parts_of_run) > 1:
                    backups = [kd.callbacks.BackupAndRestore(folder, delete_checkpoint=False)]
                options = {"batch_size": 4, "shuffle": False, "verbose": 0}
                model.fit(x, y, epochs=epochs, callbacks=backups, **options)
            found.append([model.get_weights(), optimizer_values(model)])
    lab.equal(*found)


def _of_laid_out_layers(seen):
    layers = keras.layers

    class Seen(layers.Layer):
        """Notes how each worker has what it is called with."""

        def call(self, inputs):
            for value in keras.tree.flatten(inputs):
                if hasattr(value, "placements"):
                    kind = keras.backend.standardize_dtype(value.dtype)
                    place = str(value.placements[0])
                    seen.append((self.name, kind, place, tuple(value.to_local().shape)))
            return inputs

    class Parts(layers.Layer):
        """A structure of floats, whole numbers and truth values."""

        def call(self, inputs, numbers):
            return {"x": inputs, "others": [numbers, numbers > 5]}

    class Masked(layers.Layer):
        """A layer whose output carries a mask that no argument has."""

        def __init__(self, **options):
            super().__init__(**options)
            self.masking = layers.Masking()

        def call(self, inputs, numbers):
            return self.masking(inputs * keras.ops.cast(numbers > 0, "float32"))

    def build():
        ids = keras.Input((4,), dtype="int32")
        x = layers.Embedding(12, 8, name="table")(ids)
        x = Seen(name="steps")(layers.LayerNormalization(name="by_steps")(x))
        x = x + layers.Dense(8, name="down")(layers.Dense(16, "gelu", name="up")(x))
        x = Seen(name="rows")(layers.Dropout(0.3, name="by_rows")(x))
        numbers = keras.ops.repeat(ids[:, :, None], 8, -1)
        parts = Seen(name="features")(Parts(name="parts")(x, numbers))
        for one in parts["others"]:
            x = x * (1 + keras.ops.cast(one, "float32") / 12)
        means = layers.GlobalAveragePooling1D()(Masked(name="masked")(x, numbers))
        x = Seen(name="whole")(layers.Dense(7, "tanh", name="odd")(x + parts["x"]))
        x = layers.Concatenate()([means, layers.Flatten()(x)])
        model = keras.Model(ids, layers.Dense(4)(x))
        return compiled(model, keras.optimizers.SGD(0.01, momentum=0.9), "mse")

    return build


FLOAT = "float32"
OF_OUTPUTS = {
    ".*up/kernel": (None, "model"),
    ".*down/kernel": ("model", None),
    ".*by_steps/output": ("batch", "model", None),
    ".*by_rows/output": ("model", None),
    ".*parts/output": (None, None, "model"),
    ".*masked/output": ("batch", "model"),
    ".*odd/output": ("batch", None, "model"),
}


@case("workers", backends=BACKENDS)
def outputs(lab):
    """A LayoutMap's keys for layers' outputs: steps, rows or features over a replica's workers."""
    replicas, each = _shape(lab)
    if not _by_pairs(lab) or each == 1:
        return
    seen, random = [], np.random.default_rng(0)
    x = random.integers(0, 12, (9, 4)).astype("int32")
    y = random.normal(size=(9, 4)).astype("float32")
    before = kd.config.draws()
    kd.config.set_draws("global")
    try:
        with lab.told("divide the output of a layer evenly") as told:
            _trained(lab, _of_laid_out_layers(seen), OF_OUTPUTS, x, y)
    finally:
        kd.config.set_draws(before)
    if lab.backend != "torch":
        return
    found = {(name, kind, place, *shape[1:]) for name, kind, place, shape in seen}
    expected = {("features", kind, "S(2)", 4, 8 // each) for kind in ("bool", "int32", FLOAT)}
    expected |= {("steps", FLOAT, "S(1)", 4 // each, 8), ("whole", FLOAT, "R", 4, 7)}
    lab.equal(sorted(expected), sorted(one for one in found if one[0] != "rows"))
    # the rows of a whole batch, those of an odd number are on each worker
    lab.check(("rows", FLOAT, "S(0)", (4 // replicas // each, 4, 8)) in seen, f"{seen}")
    lab.check(any("'functional/odd/output' of shape" in one for one in told), f"{told}")


BY_TOKENS = {
    ".*embedding/embeddings": (None, "model"),
    ".*einsum_dense/kernel": (None, "model", None),
    ".*/dense/kernel": (None, "model"),
    ".*/dense_1/kernel": ("model", "batch"),
}


@case("workers", backends=TORCH, like="layers")
def quantized_weights(lab):
    """Weights quantized before training and after it, with adapters; int4's of three axes refused.

    Keras packs a kernel of three axes into two for int4.
    """
    if not _by_pairs(lab):
        return

    def in_int8():
        made = model_of_tokens()
        quantized(made, 8)
        return adapted(made)

    def into_int4(model):
        with scope_of(model):
            quantized(model)
            adapted(model)

    def in_floats():
        return compiled(model_of_tokens(), "sgd", "mse")

    def kernels(model):
        return [part(one) for one in model.weights if one.dtype == "int8"]

    _, each = _shape(lab)
    strategy = lab.strategy(sharding=_map(lab, BY_TOKENS))
    ours = lab.same(in_int8, TRAIN, predict(IDS), strategy=strategy)
    lab.equal([1 / each] * 3 + [1 / lab.replicas], kernels(ours))
    fresh()
    with (
        lab.strategy(sharding=_map(lab, BY_TOKENS)).scope(),
        lab.raises(ValueError, r"einsum_dense/kernel' of shape \(8, 4\), on a mesh"),
    ):
        into_int4(in_floats())
    fitting = {key: axes for key, axes in BY_TOKENS.items() if len(axes) == 2}
    strategy = lab.strategy(sharding=_map(lab, fitting))
    ours = lab.same(in_floats, TRAIN, into_int4, TRAIN, predict(IDS), strategy=strategy)
    packed = kernels(ours)[::2]  # beside each are the zeros of its groups
    lab.equal([1 / each, 1.0, 1 / each, 1 / lab.replicas], packed)
