"""What is torch's own on several workers: buckets of gradients, when their sums start, their order.

Also what no other backend's step has: layers that a backward pass may leave out.
"""

import itertools
from functools import partial
from unittest import mock

import numpy as np

from tests.conformance.actions import fit
from tests.conformance.compare import BFLOAT16
from tests.conformance.lab import values
from tests.conformance.lazy import LazyModule, kd, keras, torch
from tests.conformance.models import compiled, dense, regression
from tests.conformance.registry import case
from tests.multiprocess.loops import calls_of, torch_launches

buckets = LazyModule("kerasdist.backends.torch.workers.buckets")

TORCH = ("torch",)
STEPS, BATCH = 7, 7
X, Y = regression(45)


def trained(lab, build=dense, epochs=2, **options):
    model = lab.made(build, **options)
    model.fit(X, Y, batch_size=BATCH, epochs=epochs, verbose=0)
    return model


def by_layer():
    """Each layer's gradients are in a bucket of their own."""
    return {"communication_options": kd.CommunicationOptions(bytes_per_pack=64)}


def branching(takes_branch):
    """One layer in every step, one in some, one never; with normalization."""

    class Branching(keras.Model):
        def __init__(self):
            super().__init__()
            self.always = keras.layers.Dense(5, activation="tanh")
            self.sometimes = keras.layers.Dense(5, activation="tanh")
            self.never = keras.layers.Dense(3)
            self.norm = keras.layers.BatchNormalization()
            self.last = keras.layers.Dense(1)
            self.step = 0

        def build(self, shape):
            for layer in (self.always, self.sometimes, self.never):
                layer.build(shape)
            self.norm.build((None, 5))
            self.last.build((None, 5))
            self.built = True

        def call(self, x, training=None):
            hidden = self.norm(self.always(x), training=training)
            if x.device.type != "meta":
                self.step += 1
                rows = takes_branch(self.step, x)
                if bool(rows.any()):
                    hidden = hidden + torch.where(rows, self.sometimes(x), 0.0)
            return self.last(hidden)

    optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
    return compiled(Branching(), optimizer, "mse", metrics=["mae"])


@case("workers", backends=TORCH)
def sums_start_in_the_backward_pass(lab):
    """From the first step on a bucket's sum starts within the backward pass, metrics' once."""
    running, started = [], []
    backward, all_reduce = torch.Tensor.backward, torch.distributed.all_reduce

    def watched_backward(*arguments, **keywords):
        running.append(True)
        try:
            return backward(*arguments, **keywords)
        finally:
            running.clear()

    def watched_sum(*arguments, **keywords):
        started.append(bool(running) if keywords.get("async_op") else "metrics")
        return all_reduce(*arguments, **keywords)

    with (
        mock.patch.object(torch.Tensor, "backward", watched_backward),
        mock.patch.object(torch.distributed, "all_reduce", watched_sum),
        calls_of(buckets.GradientSum, "__call__") as whole_sums,
    ):
        trained(lab, epochs=2, **by_layer())
    lab.equal(0, whole_sums.call_count)
    # The two buckets of each step. The metrics of each of two epochs, and which of them come early.
    sums = [one for one in started if one != "metrics"]
    lab.equal([True] * 2 * (2 * STEPS), sums)
    lab.equal(2 + 1, started.count("metrics"))


@case("workers", backends=TORCH)
def variables_in_the_place_of_others_are_compared(lab):
    """One worker's new variables may have the ids of old ones: all compare them, or none."""
    compared = []
    total = buckets.GradientSum(lab.strategy().replica_set.group, lab.job)
    with mock.patch.object(lab.job, "assert_equal", lambda *facts: compared.append(facts)):
        variables = [keras.Variable(1.0)]
        total.agree(variables, 1)
        total.agree(variables, 1)
        lab.equal(1, len(compared))
        [key] = total._agreed
        del variables
        new = [keras.Variable(2.0)]
        total._agreed[tuple(map(id, new))] = total._agreed.pop(key)  # as if of the same id
        total.agree(new, 1)
    lab.equal(2, len(compared))


@case("workers", backends=TORCH)
def layers_in_some_steps(lab):
    """Layers that some steps leave out, on all workers or on one alone; freezing between fits.

    All workers launch their collectives in one order; NCCL's would wait for each other
    for ever, unlike Gloo's.
    """
    train = fit(X, Y, batch_size=BATCH, epochs=2)
    every_third = lambda step, x: torch.full((len(x), 1), step % 3 == 0)  # noqa: E731
    where_large = lambda step, x: x[:, :1] > 0.9  # noqa: E731 (in some steps on one worker alone)
    for takes_branch, options in itertools.product((every_third, where_large), ({}, by_layer())):
        build = partial(branching, takes_branch)
        with torch_launches() as noted:
            lab.same(build, train, strategy=lab.strategy(**options))
        lab.check(len(noted) > 5 * STEPS, f"{noted}")
        lab.alike(noted)

    def freeze(model):
        model.layers[0].trainable = False

    lab.same(dense, fit(X, Y, batch_size=BATCH), freeze, fit(X, Y, batch_size=BATCH))


@case("workers", backends=TORCH)
def errors_of_a_step(lab):
    """A second backward pass is refused; an error in a step is not the end of training."""

    class Twice(keras.losses.Loss):
        def call(self, y_true, y_pred):
            loss = torch.mean((y_true - y_pred) ** 2, -1)
            if loss.requires_grad:
                loss.sum().backward(retain_graph=True)
            return loss

    model = lab.made(lambda: dense(loss=Twice()))
    with lab.raises(RuntimeError, "one backward pass"):
        model.fit(X, Y, batch_size=BATCH, epochs=2, verbose=0)
    model = trained(lab)
    loss, model.compute_loss = model.compute_loss, None
    with lab.raises(TypeError, ""):
        model.train_on_batch(X[:BATCH], Y[:BATCH])
    model.compute_loss = loss
    history = model.fit(X, Y, batch_size=BATCH, verbose=0).history
    lab.check(np.isfinite(history["loss"]).all(), f"{history}")


@case("workers", backends=TORCH)
def compression(lab):
    """Gradients that travel in bfloat16: close to one device, and equal on every worker."""
    small = lab.strategy(communication_options=kd.CommunicationOptions(compression="bf16"))
    with calls_of(torch.distributed, "all_reduce") as sums:
        train = fit(X, Y, batch_size=BATCH, epochs=2)
        model = lab.same(dense, train, strategy=small, tolerance=BFLOAT16)
    types = {call.args[0].dtype for call in sums.call_args_list}
    lab.check(torch.bfloat16 in types, f"{types}")
    lab.alike([one.tolist() for one in values(model.weights)])


@case("workers", backends=TORCH)
def types_that_torch_does_not_add(lab):
    """They are gathered, and a sum is refused by name; so are several devices."""
    with lab.raises(kd.errors.UnsupportedError, "kerasdist run --workers N"):
        kd.MultiWorkerMirroredStrategy(devices=["cpu:0", "cpu:1"])
    strategy, workers = lab.strategy(), lab.job.num_workers
    for name in ("uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2"):
        kind = getattr(torch, name)
        value = strategy.run(lambda kind=kind: torch.full((1,), lab.job.rank + 1.0).to(kind))
        gathered = strategy.gather(value, axis=0)
        lab.check(gathered.dtype is kind, f"{gathered}")
        lab.equal([one + 1.0 for one in range(workers)], gathered.float().tolist())
        with lab.raises(TypeError, f"dtype={name}"):
            strategy.reduce("SUM", value, axis=None)
