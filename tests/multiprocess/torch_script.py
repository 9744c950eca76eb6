"""One worker of a job on torch: what only this engine has, case by case, in one process.

python -m tests.multiprocess.torch_script; the environment says which worker. Prints a line a case.
"""

import os
import threading
from pathlib import Path

os.environ["KERAS_BACKEND"] = "torch"

import kerasdist as kd

STRATEGY = kd.MultiWorkerMirroredStrategy()

import keras  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from kerasdist.backends.torch.replica import threads  # noqa: E402
from kerasdist.backends.torch.workers.buckets import GradientSum  # noqa: E402
from tests.multiprocess.loops import run_cases, torch_launches  # noqa: E402

WORKERS, RANK = dist.get_world_size(), dist.get_rank()
X = np.random.default_rng(0).normal(size=(45, 4)).astype("float32")
Y = np.tanh(X[:, :1])
STEPS = 7  # in an epoch of batches of 7
CASES = []


def case(function):
    CASES.append(function)
    return function


def dense():
    return keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(6, activation="tanh"), keras.layers.Dense(1)]
    )


class Branching(keras.Model):
    """One layer in every step, one in some, one never."""

    def __init__(self, takes_branch):
        super().__init__()
        self.always = keras.layers.Dense(5, activation="tanh")
        self.sometimes = keras.layers.Dense(5, activation="tanh")
        self.never = keras.layers.Dense(3)
        self.last = keras.layers.Dense(1)
        self.takes_branch = takes_branch
        self.step = 0

    def build(self, shape):
        for layer in (self.always, self.sometimes, self.never):
            layer.build(shape)
        self.last.build((None, 5))
        self.built = True

    def call(self, x):
        hidden = self.always(x)
        if x.device.type != "meta":
            self.step += 1
            rows = self.takes_branch(self.step, x)
            if bool(rows.any()):
                hidden = hidden + torch.where(rows, self.sometimes(x), 0.0)
        return self.last(hidden)


def every_third(step, x):
    return torch.full((len(x), 1), step % 3 == 0)


def where_large(step, x):
    """Of some rows only: in some steps on one worker alone, in some on none."""
    return x[:, :1] > 0.9


def trained(make, strategy=None, optimizer=None, epochs=2, **options):
    keras.utils.set_random_seed(5)

    def build():
        model = make()
        chosen = optimizer() if optimizer else keras.optimizers.SGD(0.05, momentum=0.9)
        model.compile(optimizer=chosen, loss="mse", metrics=["mae"])
        return model

    if strategy is None:
        model = build()
    else:
        with strategy.scope():
            model = build()
    history = model.fit(X, Y, batch_size=7, epochs=epochs, verbose=0, **options).history
    return model, [*history.values(), *map(to_numpy, model.variables + model.optimizer.variables)]


def to_numpy(variable):
    return keras.ops.convert_to_numpy(variable)


def equals_one_device(make, **options):
    model, found = trained(make, STRATEGY, **options)
    _, expected = trained(make, **options)
    same(found, expected)
    return model


def same(found, expected, tolerance=2e-5):
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)


class counted:
    """Counts the calls of a method of a class."""

    def __init__(self, owner, name):
        self.owner, self.name, self.calls, self.options = owner, name, [], []

    def __enter__(self):
        self.original = original = vars(self.owner)[self.name]

        def call(*arguments, **options):
            self.calls.append(arguments)
            self.options.append(options)
            return original(*arguments, **options)

        setattr(self.owner, self.name, call)
        return self

    def __exit__(self, *error):
        setattr(self.owner, self.name, self.original)


@case
def gloo_waits_for_its_turn():
    everyone = [os.sched_getscheduler(int(one.name)) for one in Path("/proc/self/task").iterdir()]
    assert os.SCHED_BATCH in everyone, everyone
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


@case
def one_replica_meets_nobody():
    """A worker's replica runs in the thread that calls (HOUSE, move 9)."""
    before = threading.enumerate()
    strategy = kd.MultiWorkerMirroredStrategy()
    with counted(threads.ThreadPool, "__init__") as pools:
        trained(dense, strategy)
        strategy.run(lambda: kd.get_replica_context().all_reduce("SUM", torch.ones(())))
    assert not pools.calls
    new = [one.name for one in threading.enumerate() if one not in before]
    assert not [name for name in new if "replica" in name], new


@case
def reducer_serves_all_steps_but_the_first():
    with counted(GradientSum, "__call__") as sums:
        trained(dense, STRATEGY)
    assert len(sums.calls) == 1, len(sums.calls)


@case
def metrics_travel_once_an_epoch_if_nobody_looks():
    with counted(dist, "all_reduce") as messages:
        trained(dense, STRATEGY, epochs=3)
    # The gradients of each step, with who has them, and metrics once in each epoch.
    others = [options for options in messages.options if not options.get("async_op")]
    assert len(others) == 3, others
    assert len(messages.options) - len(others) == 3 * STEPS, len(messages.options)


@case
def gradients_travel_during_the_backward_pass():
    running, started = [], []
    options = kd.CommunicationOptions(bytes_per_pack=64)
    strategy = kd.MultiWorkerMirroredStrategy(communication_options=options)
    with pytest.MonkeyPatch.context() as patch:
        backward, all_reduce = torch.Tensor.backward, dist.all_reduce

        def watched_backward(*arguments, **keywords):
            running.append(True)
            try:
                return backward(*arguments, **keywords)
            finally:
                running.clear()

        def watched_sum(*arguments, **keywords):
            if keywords.get("async_op"):
                started.append(bool(running))
            return all_reduce(*arguments, **keywords)

        patch.setattr(torch.Tensor, "backward", watched_backward)
        patch.setattr(dist, "all_reduce", watched_sum)
        trained(dense, strategy, epochs=1)
    # The two buckets of each step but the first; the last one starts with the last gradient.
    assert started == [False] * 2 + [True] * 2 * (STEPS - 1), started


@case
def collectives_are_launched_in_one_order():
    """DEFECTS 20: NCCL's would wait for each other for ever, unlike Gloo's."""

    class Mixed(Branching):
        def __init__(self):
            super().__init__(where_large)
            self.norm = keras.layers.BatchNormalization()

        def build(self, shape):
            super().build(shape)
            self.norm.build((None, 5))

        def call(self, x, training=None):
            hidden = self.norm(self.always(x), training=training)
            if x.device.type != "meta":
                rows = where_large(0, x)
                if bool(rows.any()):  # on some workers only
                    hidden = hidden + torch.where(rows, self.sometimes(x), 0.0)
            return self.last(hidden)

    options = kd.CommunicationOptions(bytes_per_pack=64)
    strategy = kd.MultiWorkerMirroredStrategy(communication_options=options)
    with torch_launches() as noted:
        _, found = trained(Mixed, strategy, epochs=2)
    everyone = strategy.replica_set.job.all_gather_object("launched collectives", noted)
    assert len(noted) > 10 * STEPS, noted
    assert everyone == [everyone[0]] * WORKERS, everyone
    same(found, trained(Mixed, epochs=2)[1])


@case
def variables_in_the_place_of_others_are_compared():
    """One worker's new variables may have the ids of old ones: all compare them, or none."""
    compared = []
    job = STRATEGY.replica_set.job
    total = GradientSum(STRATEGY.replica_set.group, job)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(job, "assert_equal", lambda *facts: compared.append(facts))
        variables = [keras.Variable(1.0)]
        total._agree(variables, 1)
        total._agree(variables, 1)
        assert len(compared) == 1, compared
        [key] = total._agreed
        del variables
        new = [keras.Variable(2.0)]
        total._agreed[tuple(map(id, new))] = total._agreed.pop(key)  # as if of the same id
        total._agree(new, 1)
    assert len(compared) == 2, compared


@case
def a_second_backward_pass_is_refused():
    class Twice(keras.losses.Loss):
        def call(self, y_true, y_pred):
            loss = torch.mean((y_true - y_pred) ** 2, -1)
            if loss.requires_grad:
                loss.sum().backward(retain_graph=True)
            return loss

    with STRATEGY.scope():
        model = dense()
        model.compile("sgd", Twice())
    with pytest.raises(RuntimeError, match="one backward pass"):
        model.fit(X, Y, batch_size=7, epochs=2, verbose=0)


@case
def layer_in_some_steps():
    equals_one_device(lambda: Branching(every_third), epochs=3)


@case
def layer_on_some_workers():
    equals_one_device(lambda: Branching(where_large), epochs=3)


@case
def layer_called_twice():
    def make():
        inner = keras.layers.Dense(4, activation="tanh")
        inputs = keras.Input((4,))
        return keras.Model(inputs, keras.layers.Dense(1)(inner(inner(inputs))))

    equals_one_device(make)


@case
def frozen_between_fits():
    def go(strategy):
        model, found = trained(dense, strategy, epochs=1)
        model.layers[0].trainable = False
        history = model.fit(X, Y, batch_size=7, verbose=0, shuffle=False).history
        return [*found, *history.values(), *map(to_numpy, model.variables)]

    same(go(STRATEGY), go(None))


@case
def accumulation_and_scaling():
    for optimizer in (
        lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=3, global_clipnorm=0.1),
        lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.05), 2.0**10),
    ):
        equals_one_device(dense, optimizer=optimizer)


@case
def scaled_loss_through_batch_normalization():
    def make():
        return keras.Sequential(
            [keras.Input((4,)), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
        )

    optimizer = keras.optimizers.LossScaleOptimizer
    equals_one_device(make, optimizer=lambda: optimizer(keras.optimizers.SGD(0.05), 2.0**10))


@case
def error_in_a_step_is_no_end():
    model, _ = trained(dense, STRATEGY)
    loss, model.compute_loss = model.compute_loss, None
    with pytest.raises(TypeError):
        model.train_on_batch(X[:7], Y[:7])
    model.compute_loss = loss
    history = model.fit(X, Y, batch_size=7, verbose=0).history
    assert np.isfinite(history["loss"]).all()


@case
def newer_keras_wraps_nothing():
    """After 3.15 Keras wraps a model by itself where torch.distributed is initialized."""
    trainer = keras.src.backend.torch.trainer.TorchTrainer

    def wrap(model, force=False):
        raise AssertionError("Keras's own make_train_function was called")

    def sync(model):
        raise AssertionError("Keras's own _sync_metrics was called")

    original, trainer.make_train_function, trainer._sync_metrics = (
        trainer.make_train_function,
        wrap,
        sync,
    )
    try:
        model, _ = trained(dense, STRATEGY)
        model._sync_metrics()
        assert not hasattr(model, "ddp_model")
    finally:
        trainer.make_train_function = original
        del trainer._sync_metrics


@case
def compression():
    options = kd.CommunicationOptions(compression="bf16")
    small = kd.MultiWorkerMirroredStrategy(communication_options=options)
    with counted(dist, "all_reduce") as messages:
        _, found = trained(dense, small)
    types = {arguments[0].dtype for arguments in messages.calls}
    assert torch.bfloat16 in types, types
    _, expected = trained(dense)
    same(found, expected, tolerance=2e-2)
    weights = torch.from_numpy(np.concatenate([np.ravel(one) for one in found[-4:]]))
    everyone = [torch.empty_like(weights) for _ in range(WORKERS)]
    dist.all_gather(everyone, weights)
    assert all(torch.equal(everyone[0], one) for one in everyone)


@case
def one_device_a_worker():
    with pytest.raises(kd.errors.UnsupportedError, match="kerasdist run --workers N"):
        kd.MultiWorkerMirroredStrategy(devices=["cpu:0", "cpu:1"])


@case
def types_that_torch_does_not_add():
    """DEFECTS 11: they are gathered, and a sum is refused by name."""
    for name in ("uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2"):
        kind = getattr(torch, name)
        value = STRATEGY.run(lambda kind=kind: torch.full((1,), RANK + 1.0).to(kind))
        gathered = STRATEGY.gather(value, axis=0)
        assert gathered.dtype is kind, gathered
        assert gathered.float().tolist() == [one + 1.0 for one in range(WORKERS)], gathered
        with pytest.raises(TypeError, match=f"dtype={name}"):
            STRATEGY.reduce("SUM", value, axis=None)


if __name__ == "__main__":
    run_cases(CASES)
