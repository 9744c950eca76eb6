"""The examples of TPUStrategy in which a replica has several devices: CPU devices stand in."""

import numpy as np

from tests.facade.case import case
from tests.facade.lab import FLOAT32
from tests.facade.lazy import kd, keras, ops


def cores(lab, replicas, shape, **options):
    """A strategy, where the backend has one; elsewhere None, after its clear error."""
    assignment = kd.DeviceAssignment.build(replicas, shape)
    if lab.backend == "jax":
        return kd.TPUStrategy(experimental_device_assignment=assignment, **options)
    with lab.raises(kd.errors.UnsupportedError, "KERAS_BACKEND=jax"):
        kd.TPUStrategy(experimental_device_assignment=assignment, **options)
    return None


def rows(strategy, count):
    x = np.arange(count * 4, dtype="float32").reshape(count, 4)
    return x, next(iter(strategy.distribute_datasets_from_function(lambda _: [x] * 4)))


@case
def tpu_strategy__TPUStrategyV2_experimental_assign_to_logical_device__1(lab):
    """An addition that one of two logical devices is asked for, on one replica and on two."""
    for replicas in (1, 2):
        strategy = cores(lab, replicas, (1, 1, 1, 2))
        if strategy is None:
            continue
        x, batch = rows(strategy, 2)

        @kd.function
        def step(inputs, strategy=strategy):
            return strategy.experimental_assign_to_logical_device(inputs + inputs, 0)

        results = strategy.experimental_local_results(strategy.run(step, args=(batch,)))
        lab.equal(replicas, len(results))
        for result in results:
            lab.equal(2 * x, result)


def image_model():
    return keras.Sequential(
        [
            keras.Input((4, 4, 1)),
            keras.layers.Conv2D(3, 3, padding="same", activation="tanh"),
            keras.layers.GlobalAveragePooling2D(),
        ]
    )


@case
def tpu_strategy__TPUStrategyV2_experimental_split_to_logical_devices__1(lab):
    """Images cut along height and width over the devices of one replica: the model's numbers."""
    images = np.random.default_rng(0).normal(size=(2, 4, 4, 1)).astype("float32")
    strategy = cores(lab, 1, (1, 1, 2, 2), experimental_spmd_xla_partitioning=True)
    if strategy is None:
        return
    with strategy.scope():
        model = image_model()

    @kd.function
    def step(inputs):
        inputs = strategy.experimental_split_to_logical_devices(inputs, [1, 2, 2, 1])
        return model(inputs)

    lab.equal(model(images), strategy.run(step, args=(images,)), FLOAT32)


@case
def tpu_strategy__TPUStrategyV2_experimental_replicate_to_logical_devices__1(lab):
    """Images cut, logits and labels whole on every logical device for the loss."""
    images = np.random.default_rng(0).normal(size=(4, 4, 4, 1)).astype("float32")
    labels = np.ones((4, 3), "float32")
    strategy = cores(lab, 2, (1, 1, 1, 2))
    if strategy is None:
        return
    with strategy.scope():
        model = image_model()

    @kd.function
    def step(inputs):
        images, labels = inputs
        images = strategy.experimental_split_to_logical_devices(images, [1, 2, 1, 1])
        output = model(images)
        labels = strategy.experimental_replicate_to_logical_devices(labels)
        output = strategy.experimental_replicate_to_logical_devices(output)
        return ops.mean(ops.square(labels - output))

    [batch] = strategy.distribute_dataset([(images, labels)])
    loss = strategy.reduce("MEAN", strategy.run(step, args=(batch,)), axis=None)
    lab.equal(ops.mean(ops.square(labels - model(images))), loss, FLOAT32)
