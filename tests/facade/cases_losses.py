"""Losses in custom loops: what a replica's part of a mean is."""

import contextlib

import numpy as np

from tests.conformance.lazy import jax, kd, keras, ops
from tests.facade.case import case
from tests.facade.lab import FLOAT32


def divided(strategy, *arrays):
    [batch] = strategy.distribute_dataset([arrays if len(arrays) > 1 else arrays[0]])
    return batch


@case(replicas=(1, 2, 3))
def compute_average_loss(lab, strategy):
    """The sum of `compute_average_loss` over replicas is the mean of the global batch."""
    for rows in (6, 5, 1):
        losses = np.arange(rows, dtype="float32") + 1.0
        weights = np.linspace(0.5, 2.0, rows).astype("float32")

        def step(losses, weights, rows=rows):
            return (
                kd.compute_average_loss(losses, global_batch_size=rows),
                kd.compute_average_loss(losses, weights, global_batch_size=rows),
            )

        results = strategy.run(step, args=divided(strategy, losses, weights))
        plain, weighted = (strategy.reduce("SUM", one, axis=None) for one in results)
        lab.equal(losses.mean(), plain, FLOAT32)
        lab.equal((losses * weights).mean(), weighted, FLOAT32)


@case
def losses_of_more_dimensions(lab, strategy):
    """`compute_average_loss` sums the losses of each example; weights may be per example.

    The global batch size is by default the replica's number of rows, times the replicas.
    """
    losses = np.arange(8, dtype="float32").reshape(4, 2)
    weights = np.float32([1.0, 2.0, 3.0, 4.0])
    result = strategy.run(
        lambda x, w: kd.compute_average_loss(x, w, global_batch_size=4),
        args=divided(strategy, losses, weights),
    )
    expected = (losses * weights[:, None]).sum() / 4
    lab.equal(expected, strategy.reduce("SUM", result, axis=None), FLOAT32)
    rows = divided(strategy, np.arange(6, dtype="float32"))
    result = strategy.run(kd.compute_average_loss, args=(rows,))
    lab.equal([0.5, 2.0], lab.components(result, strategy))
    lab.equal(2.5, strategy.reduce("SUM", result, axis=None))


@case
def the_global_batch_size_as_a_tensor(lab, strategy):
    """`global_batch_size` may be a tensor, such as an all-reduced number of rows."""

    @kd.function
    def compiled(batch):
        def step(x):
            rows = kd.get_replica_context().all_reduce(
                "SUM", ops.convert_to_tensor(ops.shape(x)[0], "int32")
            )
            return kd.compute_average_loss(x, global_batch_size=rows)

        return strategy.reduce("SUM", strategy.run(step, args=(batch,)), axis=None)

    lab.equal(2.5, compiled(divided(strategy, np.arange(6, dtype="float32"))), FLOAT32)


@case(replicas=(1, 2, 3))
def scale_regularization_loss(lab, strategy):
    """The sum of `scale_regularization_loss` over the replicas is the loss itself."""

    def step():
        terms = [ops.convert_to_tensor(3.0), ops.convert_to_tensor([1.0, 2.0])]
        return kd.scale_regularization_loss(terms), kd.scale_regularization_loss(terms[0])

    both, one = (strategy.reduce("SUM", result, axis=None) for result in strategy.run(step))
    lab.equal(6.0, both, FLOAT32)
    lab.equal(3.0, one, FLOAT32)


@case(replicas=(2, 3))
def keras_losses(lab, strategy):
    """In a replica, a mean loss of Keras is divided by the number of replicas; a sum is not."""
    data = np.random.default_rng(0)
    y = data.integers(0, 2, (12, 1)).astype("float32")
    p = data.normal(size=(12, 1)).astype("float32")
    rows = np.array_split(np.arange(12), lab.replicas)
    for make in (
        keras.losses.MeanSquaredError,
        lambda: keras.losses.Huber(delta=0.5),
        lambda: keras.losses.BinaryCrossentropy(from_logits=True),
    ):
        with strategy.scope():
            loss = make()
        result = strategy.run(loss, args=divided(strategy, y, p))
        lab.equal(float(make()(y, p)), float(strategy.reduce("SUM", result, None)), FLOAT32)
        for part, one in zip(rows, lab.components(result, strategy), strict=True):
            lab.equal(np.float32(make()(y[part], p[part])) / lab.replicas, one, FLOAT32)
    # A sum, and no reduction, stay as they are.
    total = keras.losses.MeanSquaredError(reduction="sum")
    each = keras.losses.MeanSquaredError(reduction=None)
    found = strategy.run(lambda y, p: (total(y, p), each(y, p)), args=divided(strategy, y, p))
    squares = [np.square(y[part] - p[part])[:, 0] for part in rows]
    lab.equal([one.sum() for one in squares], lab.components(found[0], strategy), FLOAT32)
    lab.equal(squares, lab.components(found[1], strategy), FLOAT32)


@case
def outside_of_a_replica(lab, strategy):
    """`compute_average_loss` and `scale_regularization_loss` are refused in a scope."""
    x = np.float32([1.0, 3.0])
    lab.equal(2.0, kd.compute_average_loss(x))
    lab.equal(4.0, kd.scale_regularization_loss(ops.convert_to_tensor(4.0)))
    with strategy.scope():
        with lab.raises(RuntimeError, "Expected compute_average_loss in replica.*Received"):
            kd.compute_average_loss(x)
        with lab.raises(RuntimeError, "Expected scale_regularization_loss in replica.*Received"):
            kd.scale_regularization_loss(x)
        lab.equal(2.0, kd.compute_average_loss(x, global_batch_size=2))


@case
def a_bad_global_batch_size(lab):
    """`global_batch_size` must be an integer of at least 0; without examples the loss is 0."""
    for size in (-1, 2.5):
        with lab.raises(ValueError, "Expected global_batch_size to be an integer.*Received"):
            kd.compute_average_loss(np.float32([1.0]), global_batch_size=size)
    with lab.raises(ValueError, "one loss for each example.*Received"):
        kd.compute_average_loss(np.float32(1.0), global_batch_size=1)
    lab.equal(0.0, kd.compute_average_loss(np.float32([]), global_batch_size=0))


@case
def in_double_precision(lab):
    """`compute_average_loss` of float64 losses is float64."""
    if lab.backend == "jax":
        double = jax.enable_x64
    else:
        double = contextlib.nullcontext
    with double(*[True] * (lab.backend == "jax")):
        losses = ops.convert_to_tensor(np.array([1.0, 1e-12]))
        for size in (4, ops.convert_to_tensor(np.int64(4)), ops.convert_to_tensor(np.int64(0))):
            found = lab.numpy(kd.compute_average_loss(losses, global_batch_size=size))
            count = int(lab.numpy(size))
            lab.equal(np.float64((1.0 + 1e-12) / 4 if count else 0.0), found)
