"""Models that read sharded weights in special ways (`sharding=`). On layouts such as 2x1-full."""

import collections
import contextlib
import ctypes
import platform
import threading
import time
from pathlib import Path
from unittest import mock

import numpy as np

from tests.conformance.actions import fit, predict
from tests.conformance.cases_sharding import even, parts, parts_of
from tests.conformance.compare import ADAPTIVE, BFLOAT16
from tests.conformance.double import FLOAT64, double_precision
from tests.conformance.lab import values
from tests.conformance.lazy import kd, keras, torch
from tests.conformance.models import compiled, dense, regression, stack
from tests.conformance.registry import case

TOPIC = "workers"
TORCH = ("torch",)
BACKENDS = ("jax", "torch")


def wide():
    layers = [keras.layers.Dense(8, "tanh"), keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)]
    return stack(layers, keras.optimizers.Adam(0.01))


LAYERS, WIDTH = 5, 8
ONES = np.ones((8, WIDTH), "float32")


def _by_layers(lab):
    """A strategy by which each layer's weights are a group, or None where weights are whole."""
    strategy = lab.strategy(communication_options=kd.CommunicationOptions(bytes_per_pack=8))
    return strategy if strategy.replica_set.options.sharding.state == "full" else None


def _of_layers(strategy):
    """What trains a model of such layers for a step."""
    with strategy.scope():
        hidden = [keras.layers.Dense(WIDTH, "tanh") for _ in range(LAYERS)]
        model = stack(hidden, "sgd", inputs=(WIDTH,))
    return lambda: model.fit(ONES, ONES, batch_size=8, verbose=0)


@contextlib.contextmanager
def _alive(most):
    """Notes, as weights are gathered and as they are used, how many bytes of them there are.

    A thread of Gloo may drop its reference to what it has gathered after `wait` has returned: where
    there are more than `most`, that gets a moment.
    """
    from torch.multiprocessing.reductions import StorageWeakRef

    from kerasdist.backends.torch.state.gathered import Leaf
    from kerasdist.backends.torch.workers.process_group import ProcessGroup

    noted, sizes = [], {}
    start, fill = ProcessGroup.start_gather_of_parts, Leaf.fill

    def note(tensor):
        storage = tensor.untyped_storage()
        sizes[StorageWeakRef(storage)] = storage.nbytes()
        until = time.monotonic() + 1
        while there() > most and time.monotonic() < until:
            time.sleep(0.01)
        noted.append(there())

    def there():
        return sum(size for ref, size in sizes.items() if not ref.expired())

    def started(*args):
        result = start(*args)
        note(result[1])
        return result

    def filled(leaf, whole):
        note(whole)
        fill(leaf, whole)

    with (
        mock.patch.object(ProcessGroup, "start_gather_of_parts", started),
        mock.patch.object(Leaf, "fill", filled),
    ):
        yield noted


@case(TOPIC, backends=TORCH)
def gathered_by_groups(lab):
    """No more than two groups of weights are gathered at any time (ADR 62)."""
    strategy = _by_layers(lab)
    if strategy is None:
        return
    step = _of_layers(strategy)
    step()  # finds out in which order groups are used
    shards = [-(-size // lab.shards) for size in (WIDTH * WIDTH, WIDTH)]
    group = 4 * lab.shards * sum(shards)  # as the last shards are padded
    with _alive(2 * group) as noted:
        step()
    lab.check(group < max(noted) <= 2 * group, f"{max(noted) / group} groups were gathered at once")


def _resident(key):
    """Bytes of memory that this process has (VmRSS), or had at most (VmHWM)."""
    return 1024 * int(Path("/proc/self/status").read_text().split(f"{key}:")[1].split()[0])


@case(TOPIC, backends=TORCH)
def memory_of_a_step(lab):
    """What the process of a worker takes in a step, by the system's count, not by the variables'.

    Its shards of the gradients, and few whole weights and gradients: Gloo holds a copy of each
    gradient until its sum is waited for.
    """
    strategy = _by_layers(lab)
    if strategy is None:
        return
    layers, width = 8, 1024
    block = 4 * width * width
    assert ctypes.CDLL(None).mallopt(-3, 2**20)  # what is freed goes back to the system at once
    ones = np.ones((8, width), "float32")
    with strategy.scope():
        hidden = [keras.layers.Dense(width, use_bias=False) for _ in range(layers)]
        model = stack(hidden, keras.optimizers.SGD(1e-6), inputs=(width,))
    model.predict(ones, verbose=0)
    before = _resident("VmRSS")
    for _ in range(2):
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
        model.fit(ones, ones, batch_size=8, verbose=0)
    own = layers * block / lab.shards
    most, left = _resident("VmHWM") - before, _resident("VmRSS") - before
    lab.check(own < most <= own + 7 * block, f"{most / block} blocks beside {own / block}")
    lab.check(left <= 3 * block, f"{left / block} blocks are left")


def reached_by_some_rows():
    class Shift(keras.layers.Layer):
        def build(self, shape):
            self.shift = self.add_weight(shape=shape[1:], initializer="ones", name="shift")

        def call(self, x):
            return x + self.shift

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.before = [keras.layers.Dense(WIDTH, "tanh") for _ in range(LAYERS)]
            self.shift = Shift()
            self.after = keras.layers.Dense(1)

        def call(self, x):
            hidden, chosen = x, x[:, :1] > 0
            for layer in self.before:
                hidden = layer(hidden)
            shifted = self.shift(hidden)
            kept = hidden + keras.ops.stop_gradient(shifted - hidden)
            if not x.is_meta and not chosen.any():
                shifted = kept
            return self.after(keras.ops.where(chosen, shifted, kept))

    model = compiled(Model(), keras.optimizers.SGD(0.1), "mse")
    model(np.zeros((1, WIDTH), "float32"))
    return model


@case(TOPIC, backends=TORCH)
def weight_that_only_one_worker_reaches(lab):
    """A worker that waits for a sum goes on: another one sums after its backward pass.

    And needs all workers in that pass, to gather weights.
    """
    from kerasdist.backends.torch.workers import buckets

    x = np.random.default_rng(3).normal(size=(12, WIDTH)).astype("float32")
    x[:, 0] = np.where(np.arange(12) < 2, 1.0, -1.0)  # all of the first worker's
    strategy = lab.strategy(communication_options=kd.CommunicationOptions(bytes_per_pack=8))
    with mock.patch.object(buckets, "_PATIENCE", 0.2):
        train = fit(x, x[:, 1:2], batch_size=12, epochs=2, shuffle=False)
        lab.same(reached_by_some_rows, train, strategy=strategy)


@case(TOPIC, backends=TORCH)
def as_many_collectives_as_fsdp2(lab):
    """A step gathers and sums no more often than FSDP2's of the same layers, by torch's own count.

    N groups: N - 1 gathers a pass, N sums of parts, and the sum of the flags (ADR 62).
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.utils._python_dispatch import TorchDispatchMode

    strategy = _by_layers(lab)
    if strategy is None:
        return
    hosts = lab.replicas // lab.shards
    sizes = {"host": hosts, "device": lab.shards} if hosts > 1 else {"device": lab.shards}
    mesh = init_device_mesh("cpu", (*sizes.values(),), mesh_dim_names=(*sizes,))
    linear = torch.nn.Linear
    blocks = [torch.nn.Sequential(linear(WIDTH, WIDTH), torch.nn.Tanh()) for _ in range(LAYERS)]
    module = torch.nn.Sequential(*blocks)
    for block in blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(module, mesh=mesh)
    update = torch.optim.SGD(module.parameters(), 0.1)

    def step_by_hand():
        update.zero_grad()
        rows = torch.from_numpy(ONES)
        torch.nn.functional.mse_loss(module(rows), rows).backward()
        update.step()

    class Counting(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.found = collections.Counter()

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.found[func.name().partition(".")[0]] += 1
            return func(*args, **(kwargs or {}))

    def counts(step):
        step()  # the first one makes buckets, and finds out in which order groups are used
        with Counting() as mode:
            step()
        names = "_allgather_base_", "_reduce_scatter_base_", "allreduce_"
        return [mode.found[f"c10d::{name}"] for name in names]

    ours, theirs = counts(_of_layers(strategy)), counts(step_by_hand)
    # Those between hosts, one a group, on both sides; and the flags, metrics and the batch's size.
    between = LAYERS * (hosts > 1)
    lab.equal([2 * LAYERS, LAYERS, between], theirs)
    lab.equal([2 * LAYERS - 2, LAYERS], ours[:2])
    lab.check(ours[2] <= between + 2, f"{ours} collectives beside FSDP2's {theirs}")


@case(TOPIC, backends=TORCH)
def gathered_while_one_computes(lab):
    """A timeline of a step over a network that is late: gathers arrive while layers compute.

    Forward and backward (ADR 62). By order of events: the next group's gather starts
    before the layer of this one computes, and is waited for after that.
    """
    from benchmarks.timeline import recorded

    strategy = _by_layers(lab)
    if strategy is None:
        return
    timeline = [str(one) for one in recorded(strategy, LAYERS, width=WIDTH, seconds=0.01)]
    gathers = 2 * LAYERS - 2
    lab.equal(gathers, sum(one.endswith("starts") for one in timeline))
    # The last layer's weights are still there; the gather of those before it starts as the last
    # computes, the others as the layer behind has got its weights for its derivative.
    ends = [f"layer {layer} computed" for layer in range(LAYERS - 1)]
    ends += [f"layer {layer} differentiated" for layer in range(LAYERS - 2, 0, -1)]
    for number, end in enumerate(ends, 1):
        events = f"gather {number} starts", end, f"gather {number} is needed"
        places = [timeline.index(one) for one in events]
        lab.check(places == sorted(places), f"not {events}: {timeline}")


def tied():
    class Tied(keras.Model):
        def __init__(self):
            super().__init__()
            self.embedding = keras.layers.Embedding(6, 4)
            self.dense = keras.layers.Dense(4, kernel_regularizer="l2")

        def call(self, ids):
            hidden = self.dense(self.dense(self.embedding(ids)))
            return keras.ops.matmul(hidden, keras.ops.transpose(self.embedding.embeddings))

    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model = compiled(Tied(), keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True), loss)
    model(np.zeros((1, 3), "int32"))
    return model


@case(TOPIC, backends=BACKENDS)
def shared_and_tied_weights(lab):
    """Weights that a step reads several times: tied, in a shared layer, in a regularizer."""
    ids = np.random.default_rng(1).integers(0, 6, (9, 3)).astype("int32")
    lab.same(tied, fit(ids, ids, batch_size=4, epochs=2), predict(ids))


@case(TOPIC, backends=BACKENDS)
def frozen_and_unfrozen(lab):
    """Layers are frozen, trained beside, and trained again, by LoRA at last."""
    x, y = regression(9)
    train = fit(x, y, batch_size=4)

    def first(trainable):
        def change(model):
            model.layers[0].trainable = trainable
            model.compile(keras.optimizers.Adam(0.01), "mse")

        return change

    def adapt(model):
        for layer in model.layers[:2]:
            layer.enable_lora(2)
        # LoRA begins with gradients of zero, of whose roundings Adam would make whole steps.
        model.compile(keras.optimizers.SGD(0.1), "mse")

    actions = first(False), train, first(True), train, adapt, train, predict(x)
    lab.same(wide, *actions, tolerance=ADAPTIVE)


@case(TOPIC, backends=BACKENDS, like="sharded_models.in_double")
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
    """Gradients travel in bfloat16, those of sharded weights too."""
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


@case(TOPIC, backends=BACKENDS, like="sharded_models.frozen_and_unfrozen")
def clipping_in_another_thread(lab):
    """While sharded state is updated, another thread clips whole gradients."""
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

    model = lab.made(lambda: dense(keras.optimizers.SGD(Schedule(), global_clipnorm=1.0)))
    model.fit(x, y, batch_size=8, verbose=0)
    one = -np.ones(3, "float32") / np.sqrt(15.0).astype("float32")
    lab.equal([one, 2 * one], found[-1])


@case(TOPIC, backends=TORCH)
def updated_before_the_backward_pass(lab):
    """A backward pass through weights that have changed is refused, as by autograd itself."""

    class UpdatesTooEarly(keras.Sequential):
        def train_step(self, data):
            x, y = data
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
            weights = self.trainable_variables
            self.optimizer.apply([keras.ops.ones_like(one) for one in weights], weights)
            loss.backward()
            return {"loss": loss}

    x, y = regression(8)
    layers = [keras.Input((4,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)]
    model = lab.made(lambda: compiled(UpdatesTooEarly(layers), "sgd", "mse"))
    with lab.raises(RuntimeError, "before the weights.*are updated|modified by an inplace"):
        model.fit(x, y, verbose=0)
    lab.still_usable(lab.strategy())


@case(TOPIC, backends=TORCH)
def refusals(lab):
    """What sharded state cannot have is refused, with what to use instead."""

    class Assigning(keras.layers.Layer):
        def build(self, shape):
            self.scale = self.add_weight(shape=(4,), initializer="ones", name="scale")

        def call(self, x):
            self.scale.assign(self.scale * 0.5)
            return x * self.scale

    x, y = regression(8)
    strategy = lab.strategy(sharding=kd.Sharding("full", min_size=1))
    with strategy.scope():
        model, assigning = dense(), stack([Assigning(), keras.layers.Dense(1)], "sgd")
    with lab.raises(kd.errors.UnsupportedError, "load the weights on all workers"):
        model.fit(x, y, verbose=0, callbacks=[kd.callbacks.BroadcastGlobalVariables()])
    with lab.raises(kd.errors.UnsupportedError, "Expected only the optimizer.*min_size"):
        assigning.fit(x, y, verbose=0)
    lab.still_usable(strategy)


@case(TOPIC, backends=BACKENDS)
def machines_that_cannot_divide(lab):
    """Of `within="host"`: one device a machine, machines of several sizes, and one machine."""
    sharding, workers, rank = kd.Sharding("full", 1, "host"), lab.job.num_workers, lab.job.rank

    def on_machine(name):
        return mock.patch.object(platform, "node", return_value=name)

    if workers == lab.replicas:
        alone = "Expected several .* on each machine.*Received: within='host'.*Leave out `within`"
        with on_machine(f"machine {rank}"), lab.raises(kd.errors.UnsupportedError, alone):
            lab.strategy(sharding=sharding)
    if workers > 2:
        unequal = r"as many workers on each machine.*Received: \[1, "
        with on_machine(f"machine {rank > 0}"), lab.raises(kd.errors.ClusterError, unequal):
            lab.strategy(sharding=sharding)
    if lab.strategy().replica_set.options.sharding.within is None:
        model = lab.made(even, sharding=sharding)
        own = parts_of(model.weights, lab.replicas, lab.number_of_shard)
        lab.equal(own, parts(model.weights))
