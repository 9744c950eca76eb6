"""Models that read sharded weights in special ways (`sharding=`). On layouts such as 2x1-full."""

import contextlib
import threading

import numpy as np

from kerasdist.plan.groups import weight_groups
from tests.conformance.actions import fit, predict
from tests.conformance.compare import ADAPTIVE, BFLOAT16
from tests.conformance.double import FLOAT64, double_precision
from tests.conformance.lab import fresh, values
from tests.conformance.lazy import kd, keras
from tests.conformance.models import dense, regression
from tests.conformance.registry import case

TOPIC = "workers"
TORCH = ("torch",)
BACKENDS = ("jax", "torch")


def wide(units=8, features=4):
    layers = [keras.layers.Dense(units, "tanh"), keras.layers.Dense(units, "tanh")]
    model = keras.Sequential([keras.Input((features,)), *layers, keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.01), "mse")
    return model


class _Watch:
    """Notes the collectives of steps, and how many bytes of gathered groups live at each."""

    def __init__(self, group):
        self.order, self.most_alive = [], 0
        self._group, self._refs = group, {}

    def _noted(self, name, original):
        def started(*args):
            self.order.append(name)
            result = original(*args)
            if name == "gather":
                self._remember(result[1])
            return result

        return started

    def _remember(self, tensor):
        from torch.multiprocessing.reductions import StorageWeakRef

        storage = tensor.untyped_storage()
        self._refs[StorageWeakRef(storage)] = storage.nbytes()
        self._refs = {ref: size for ref, size in self._refs.items() if not ref.expired()}
        self.most_alive = max(self.most_alive, sum(self._refs.values()))

    @contextlib.contextmanager
    def on(self):
        from kerasdist.backends.torch.state.gathered import Leaf

        fill, group = Leaf.fill, self._group

        def filled(leaf, whole):
            self._remember(whole)
            fill(leaf, whole)

        names = {
            "start_gather_of_parts": "gather",
            "start_sum_of_parts": "scatter",
            "start_sum": "sum",
        }
        for method, name in names.items():
            setattr(group, method, self._noted(name, getattr(group, method)))
        Leaf.fill = filled
        try:
            yield
        finally:
            Leaf.fill = fill
            for method in names:
                delattr(group, method)


@case(TOPIC, backends=TORCH)
def gathered_by_groups(lab):
    """A step of N groups has at most 3 N - 1 collectives and one sum (DEFECTS 19, ADR 62).

    The next group is under way while one computes; no more than two are gathered at any time.
    """
    if lab.strategy().replica_set.options.sharding.state != "full":
        return
    layers, width = 5, 8
    x, y = np.ones((8, width), "float32"), np.ones((8, width), "float32")
    small = kd.CommunicationOptions(bytes_per_pack=8)
    strategy = lab.strategy(sharding=kd.Sharding("full", 1), communication_options=small)
    seen = []

    class Layer(keras.layers.Dense):
        def call(self, inputs):
            result = super().call(inputs)
            seen.append(watch.order.count("gather"))
            return result

    with strategy.scope():
        model = keras.Sequential([keras.Input((width,)), keras.layers.Dense(width)])
        for _ in range(layers - 1):
            model.add(Layer(width, "tanh"))
        model.compile("sgd", "mse")
    watch = _Watch(strategy.replica_set.group)
    model.fit(x, y, batch_size=8, verbose=0)
    with watch.on():
        seen.clear()
        model.fit(x, y, batch_size=8, verbose=0)
    order = watch.order
    # The last one is still there, and the first layer's input has no gradient.
    lab.equal(layers + layers - 1 - 1, order.count("gather"))
    lab.equal(layers, order.count("scatter"))
    lab.equal(1, order.count("sum"))  # of the flags that say which gradients there are
    # `kerasdist plan` says the same, but for the first layer's input, of which it does not know.
    planned = weight_groups(model, kd.Sharding("full", 1), lab.replicas, limit=8)
    lab.equal((4 * (width * width + width),) * layers, tuple(planned.sizes))
    kinds = [one.kind for one in planned.collectives()]
    lab.equal(order.count("gather") + 1, kinds.count("all-gather"))
    lab.equal(order.count("scatter"), kinds.count("reduce-scatter"))
    # As a layer computes, the next one's gather has started; as the last one does, that of the
    # backward pass.
    lab.equal([3, 4, 5, 6], seen)
    parts = [-(-size // lab.replicas) for size in (width * width, width)]
    group_bytes = 4 * lab.replicas * sum(parts)  # as the last parts are padded
    lab.check(
        watch.most_alive <= 2 * group_bytes,
        f"{watch.most_alive / group_bytes} groups were gathered at one time",
    )
    weights = strategy.replica_set.shard_rules.weights
    lab.equal([0] * 2 * layers, [weights.leaf(*_with_shard(one)).address for one in model.weights])


def _with_shard(variable):
    from kerasdist.backends.torch.state.shards import shard_of

    return variable, shard_of(variable)


@case(TOPIC, backends=TORCH)
def gathered_while_one_computes(lab):
    """A timeline of a step: each gather but the first is on its way while a layer computes.

    Forward and backward (DEFECTS 19, ADR 62). A gather is on its way from its start until a layer
    waits for it.
    """
    import torch

    if lab.strategy().replica_set.options.sharding.state != "full":
        return
    layers, width, timeline, asked = 5, 8, [], []
    x, y = np.ones((8, width), "float32"), np.ones((8, width), "float32")

    class Computing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, number, inputs):
            ctx.number = number
            timeline.append(f"forward {number}")
            return inputs.view_as(inputs)

        @staticmethod
        def backward(ctx, gradient):
            timeline.append(f"backward {ctx.number}")
            return None, gradient

    class Layer(keras.layers.Dense):
        def call(self, inputs):
            outputs = super().call(inputs)
            return outputs if inputs.is_meta else Computing.apply(self.number, outputs)

    class OnItsWay:
        def __init__(self, work):
            self.work, self.number = work, len(asked)
            asked.append(self)
            timeline.append(f"gather {self.number}")

        def wait(self):
            timeline.append(f"wait {self.number}")
            return self.work.wait()

    small = kd.CommunicationOptions(bytes_per_pack=8)
    strategy = lab.strategy(sharding=kd.Sharding("full", 1), communication_options=small)
    with strategy.scope():
        model = keras.Sequential([keras.Input((width,))])
        for number in range(layers):
            model.add(Layer(width, "tanh"))
            model.layers[-1].number = number
        model.compile("sgd", "mse")
    model.fit(x, y, batch_size=8, verbose=0)
    group, timeline[:] = strategy.replica_set.group, []
    start = group.start_gather_of_parts

    def started(part):
        work, whole = start(part)
        return OnItsWay(work), whole

    group.start_gather_of_parts = started
    try:
        model.fit(x, y, batch_size=8, verbose=0)
    finally:
        del group.start_gather_of_parts
    lab.check(len(asked) >= 2 * layers - 2, f"{len(asked)} gathers")
    for number in range(1, len(asked)):
        begin, end = timeline.index(f"gather {number}"), timeline.index(f"wait {number}")
        lab.check(
            any(one.startswith(("forward", "backward")) for one in timeline[begin:end]),
            f"no layer computes while gather {number} is on its way: {timeline}",
        )
    # In the backward pass too: the last gather starts after a layer's derivative, and another
    # one's follows before it is waited for.
    begin, end = (timeline.index(f"{what} {len(asked) - 1}") for what in ("gather", "wait"))
    lab.check("backward 3" in timeline[:begin], f"{timeline}")
    lab.check("backward 1" in timeline[begin:end], f"{timeline}")


def recurrent():
    cells = [keras.layers.LSTMCell(3), keras.layers.GRUCell(3)]
    layers = [keras.layers.LSTM(4, return_sequences=True), keras.layers.RNN(cells)]
    model = keras.Sequential([keras.Input((5, 2)), *layers, keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.01), "mse")
    return model


@case(TOPIC, backends=BACKENDS)
def recurrent_layers(lab):
    """Layers that read weights at each time step, more of them than stay gathered."""
    x = np.random.default_rng(0).normal(size=(9, 5, 2)).astype("float32")
    actions = fit(x, x[:, 0, :1], batch_size=4, epochs=3), predict(x)
    lab.same(recurrent, *actions, tolerance=ADAPTIVE)


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
    lab.same(computed_again, fit(x, y, batch_size=4, epochs=2))


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


@case(TOPIC, backends=BACKENDS)
def shared_and_tied_weights(lab):
    """Weights that a step reads several times: tied, in a shared layer, in a regularizer."""
    ids = np.random.default_rng(1).integers(0, 6, (9, 3)).astype("int32")
    lab.same(tied, fit(ids, ids, batch_size=4, epochs=2), predict(ids))


def frozen():
    model = wide()
    model.layers[0].trainable = False
    model.compile(keras.optimizers.Adam(0.01), "mse")
    return model


@case(TOPIC, backends=BACKENDS)
def frozen_and_unfrozen(lab):
    """Layers are frozen, trained beside, and trained again."""
    x, y = regression(9)

    def unfreeze(model):
        model.layers[0].trainable = True
        model.compile(keras.optimizers.Adam(0.01), "mse")
        return model.fit(x, y, batch_size=4, verbose=0)

    lab.same(frozen, fit(x, y, batch_size=4), unfreeze, tolerance=ADAPTIVE)


def adapted():
    model = wide()
    for layer in model.layers[:2]:
        layer.enable_lora(2)
    model.compile(keras.optimizers.Adam(0.01), "mse")
    return model


@case(TOPIC, backends=BACKENDS)
def lora(lab):
    """LoRA on sharded weights, merged when saved."""
    x, y = regression(9)
    lab.same(adapted, fit(x, y, batch_size=4, epochs=2), predict(x), tolerance=ADAPTIVE)


@case(TOPIC, backends=BACKENDS)
def in_bfloat16(lab):
    """Weights in bfloat16, which NumPy has not, are trained, read and assigned."""
    x, y = regression(9)
    keras.config.set_dtype_policy("bfloat16")
    try:
        model = lab.same(wide, fit(x, y, batch_size=4), tolerance=BFLOAT16)
        weights = model.get_weights()
        model.set_weights(weights)
        lab.equal(weights, model.get_weights())
    finally:
        keras.config.set_dtype_policy("float32")


@case(TOPIC, backends=TORCH)
def compressed(lab):
    """Gradients travel in bfloat16, those of sharded weights too (found with DEFECTS 19)."""
    x, y = regression(9)
    options = kd.CommunicationOptions(compression="bf16")
    strategy = lab.strategy(communication_options=options)
    lab.same(wide, fit(x, y, batch_size=4), tolerance=BFLOAT16, strategy=strategy)


@case(TOPIC, backends=BACKENDS)
def in_double(lab):
    """In float64 the numbers agree to 1e-11."""
    x, y = (one.astype("float64") for one in regression(9))
    with double_precision(lab.backend):
        lab.same(wide, fit(x, y, batch_size=4, epochs=2), tolerance=FLOAT64)


@case(TOPIC, backends=BACKENDS)
def restarts_with_another_sharding(lab):
    """A backup is restored with another `sharding`."""
    x, y = regression(12)
    options = {"batch_size": 4, "verbose": 0}

    def model_of(strategy):
        fresh()
        with strategy.scope():
            return wide()

    untouched = model_of(lab.strategy(sharding=None))
    untouched.fit(x, y, epochs=4, **options)
    others = [kd.Sharding(state, min_size=1) for state in ("full", "optimizer")]
    for other in (*others, None):
        with lab.folder() as folder:
            backup = lambda: kd.callbacks.BackupAndRestore(  # noqa: E731
                folder, delete_checkpoint=False
            )
            model_of(lab.strategy()).fit(x, y, epochs=2, callbacks=[backup()], **options)
            resumed = model_of(lab.strategy(sharding=other))
            resumed.fit(x, y, epochs=4, callbacks=[backup()], **options)
            lab.equal(untouched.get_weights(), resumed.get_weights(), ADAPTIVE)


@case(TOPIC, backends=BACKENDS)
def clipping_in_another_thread(lab):
    """While sharded state is updated, another thread clips whole gradients (issue 31, point 2)."""
    x, y = regression(8)
    found = []

    class Schedule(keras.optimizers.schedules.LearningRateSchedule):
        def __call__(self, step):
            thread = threading.Thread(target=clip)
            thread.start()
            thread.join()
            return 0.1

        def get_config(self):
            return {}

    def clip():
        weights = [keras.Variable(np.zeros(3, "float32")) for _ in range(2)]
        optimizer = keras.optimizers.SGD(1.0, global_clipnorm=1.0)
        optimizer.apply([keras.ops.ones(3), 2 * keras.ops.ones(3)], weights)
        found.append(values(weights))

    with lab.strategy().scope():
        model = dense()
        model.compile(keras.optimizers.SGD(Schedule(), global_clipnorm=1.0), "mse")
    model.fit(x, y, batch_size=8, verbose=0)
    one = -np.ones(3, "float32") / np.sqrt(15.0).astype("float32")
    lab.equal([one, 2 * one], found[-1])


class UpdatesTooEarly(keras.Model):
    def __init__(self):
        super().__init__()
        self.first, self.second = keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)

    def call(self, x):
        return self.second(self.first(x))

    def train_step(self, data):
        x, y = data
        loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        weights = self.trainable_variables
        self.optimizer.apply([keras.ops.ones_like(one) for one in weights], weights)
        loss.backward()
        return {"loss": loss}


@case(TOPIC, backends=TORCH)
def updated_before_the_backward_pass(lab):
    """A backward pass through weights that have changed is refused, as by autograd itself."""
    x, y = regression(8)
    with lab.strategy().scope():
        model = UpdatesTooEarly()
        model.compile("sgd", "mse")
    with lab.raises(RuntimeError, "before the weights.*are updated|modified by an inplace"):
        model.fit(x, y, verbose=0)
    lab.still_usable(lab.strategy())


class Assigning(keras.layers.Layer):
    def build(self, shape):
        self.scale = self.add_weight(shape=(4,), initializer="ones", name="scale")

    def call(self, x):
        self.scale.assign(self.scale * 0.5)
        return x * self.scale


@case(TOPIC, backends=TORCH)
def refusals(lab):
    """What sharded state cannot have is refused, with what to use instead."""
    x, y = regression(8)
    strategy = lab.strategy(sharding=kd.Sharding("full", min_size=1))
    with strategy.scope():
        model = dense()
        assigning = keras.Sequential([keras.Input((4,)), Assigning(), keras.layers.Dense(1)])
        assigning.compile("sgd", "mse")
    with lab.raises(kd.errors.UnsupportedError, "load the weights on all workers"):
        model.fit(x, y, verbose=0, callbacks=[kd.callbacks.BroadcastGlobalVariables()])
    with lab.raises(kd.errors.UnsupportedError, "Expected only the optimizer.*min_size"):
        assigning.fit(x, y, verbose=0)
    lab.still_usable(strategy)
