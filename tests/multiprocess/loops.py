"""What workers' cases share: the step of their custom loops, and what is called and launched."""

import contextlib
from collections.abc import Iterator
from unittest import mock

import pytest

from tests.conformance.lazy import kd, keras


def calls_of(owner, name):
    """Notes the calls of a function or method, which goes on as before."""
    original = getattr(owner, name)
    return mock.patch.object(owner, name, autospec=True, side_effect=original)


def noting(event, into):
    """A callback that notes the numbers of the batches or epochs of an event."""
    return keras.callbacks.LambdaCallback(**{event: lambda number, logs: into.append(number)})


@contextlib.contextmanager
def torch_launches() -> Iterator[list]:
    """Notes each collective as torch launches it, by a wrapper: its name, its size."""
    import torch.distributed as dist

    from kerasdist.backends.torch.workers import process_group

    noted = []

    def watched(name, original):
        def launch(*tensors, **options):
            noted.append((name, *(one.numel() for one in tensors)))
            return original(*tensors, **options)

        return launch

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in (
            (dist, "all_reduce"),
            (dist, "broadcast"),
            (process_group, "_gather_into"),
            (process_group, "_scatter_sum"),
        ):
            patch.setattr(owner, name, watched(name, getattr(owner, name)))
        yield noted


def squared_error_step(model, batch_size, optimizer=None):
    """A step of a replica: it trains on a pair of inputs and targets, and returns its loss."""
    optimizer = optimizer or model.optimizer

    def step(data):
        inputs, targets = data

        def loss():
            errors = keras.ops.square(model(inputs, training=True) - targets)
            errors = keras.ops.mean(errors, -1)
            return kd.compute_average_loss(errors, global_batch_size=batch_size)

        value, gradients = kd.value_and_grad(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        return value

    return step


def same_loop(lab, build, batches, strategy, **compared):
    """A custom loop of two epochs has one device's losses, weights and state; returns the model."""

    def trained(by):
        def train(model):
            step = squared_error_step(model, len(batches[0][0]))

            @kd.function
            def total(batch):
                return by.reduce("SUM", by.run(step, args=(batch,)), axis=None)

            data = by.distribute_dataset(batches)
            return [float(keras.ops.convert_to_numpy(total(one))) for _ in range(2) for one in data]

        return [train]

    _, expected = lab.run(build, trained(kd.get_strategy()))
    model, actual = lab.run(build, trained(strategy), strategy)
    lab.equal(expected.parts(optimizer=True), actual.parts(optimizer=True), **compared)
    return model
