"""The examples of TPUStrategy that show no TPU: replicas are replicas on any device."""

import collections

import numpy as np

from tests.facade.case import case
from tests.facade.lab import FLOAT32
from tests.facade.lazy import kd, keras, ops


class Parts:
    """The pieces that the class's docstring puts together one by one."""

    def __init__(self, lab):
        self.strategy = lab.strategy()
        with self.strategy.scope():
            self.model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(2)])
            self.optimizer = keras.optimizers.SGD(learning_rate=0.1)
            self.optimizer.build(self.model.trainable_variables)

    def data(self):
        def dataset_fn(context):
            x = np.random.default_rng(1).random((2, 5)).astype("float32")
            return [(x[:1], np.array([[1]])), (x[1:], np.array([[0]]))] * 3

        return self.strategy.distribute_datasets_from_function(dataset_fn)

    def train_step(self):
        def step(inputs):
            features, labels = inputs

            def loss():
                logits = self.model(features, training=True)
                each = keras.losses.sparse_categorical_crossentropy(
                    labels, logits, from_logits=True
                )
                return ops.sum(each)

            variables = self.model.trainable_variables
            value, gradients = kd.value_and_grad(loss, variables)
            self.optimizer.apply_gradients(zip(gradients, variables, strict=True))
            return value

        return kd.function(lambda batch: self.strategy.run(step, args=(batch,)))


@case
def tpu_strategy__TPUStrategyV2__2(lab):
    """A model and an optimizer made in the scope have variables on every replica."""
    parts = Parts(lab)
    for variable in parts.model.trainable_variables:
        lab.equal(2, len(parts.strategy.experimental_local_results(variable)))


@case
def tpu_strategy__TPUStrategyV2__3(lab):
    """A dataset function's batches: every replica takes the next one."""
    parts = Parts(lab)
    batch = next(iter(parts.data()))
    labels = lab.components(batch[1], parts.strategy)
    lab.equal([[[1]], [[0]]], labels)


@case
def tpu_strategy__TPUStrategyV2__4(lab):
    """A training step equals the step on both replicas' rows together."""
    parts = Parts(lab)
    twin = keras.models.clone_model(parts.model)
    twin.set_weights(parts.model.get_weights())
    batch = next(iter(parts.data()))
    parts.train_step()(batch)
    x, y = (np.concatenate(lab.components(one, parts.strategy)) for one in batch)

    def loss():
        return ops.sum(keras.losses.sparse_categorical_crossentropy(y, twin(x), from_logits=True))

    _, gradients = kd.value_and_grad(loss, twin.trainable_variables)
    keras.optimizers.SGD(learning_rate=0.1).apply(gradients, twin.trainable_variables)
    lab.equal(twin.get_weights(), parts.model.get_weights(), FLOAT32)


@case
def tpu_strategy__TPUStrategyV2__5(lab):
    """The compiled step is called on and on."""
    parts = Parts(lab)
    step = parts.train_step()
    losses = [parts.strategy.reduce("SUM", step(batch), None) for batch in parts.data()]
    lab.equal(3, len(losses))
    values = lab.numpy(losses)
    lab.check(values[-1] < values[0], f"the loss falls, received {values}")


@case
def tpu_strategy__TPUStrategyV2_run__1(lab):
    """A plain number a replica, doubled in a compiled function."""
    strategy = lab.strategy()

    @kd.function
    def compiled():
        values = strategy.experimental_distribute_values_from_function(
            lambda context: context.num_replicas_in_sync
        )
        return strategy.run(lambda x: x * 2, args=(values,))

    lab.equal({4}, {int(one) for one in lab.components(compiled(), strategy)})


def numbers(strategy):
    """As many numbers as replicas, one batch."""
    data = [np.arange(strategy.num_replicas_in_sync, dtype="float32")]
    return iter(strategy.experimental_distribute_dataset(data))


@case
def tpu_strategy__TPUStrategyV1_run__3(lab):
    """A batch with a row for each replica."""
    strategy = lab.strategy()
    lab.equal([[0.0], [1.0]], lab.components(next(numbers(strategy)), strategy))


@case
def tpu_strategy__TPUStrategyV1_run__4(lab):
    """A compiled step that sums its input, called outside of every replica."""
    step = kd.function(ops.sum)
    lab.equal(3.0, step(ops.convert_to_tensor([1.0, 2.0])))


@case
def tpu_strategy__TPUStrategyV1_run__5(lab):
    """The step run on the replicas, with options that no backend needs."""
    strategy = lab.strategy()
    step = kd.function(ops.sum)
    options = kd.RunOptions(experimental_bucketizing_dynamic_shape=True)
    result = strategy.run(step, args=(next(numbers(strategy)),), options=options)
    lab.equal([0.0, 1.0], lab.components(result, strategy))


@case
def tpu_strategy__TPUStrategyV1_run__2(lab):
    """Options of a run: kerasdist's and tf.distribute's own; anything else is refused."""
    strategy = lab.strategy()
    tf_options = collections.namedtuple("RunOptions", ["dynamic", "bucketizing", "xla"])

    def run(options):
        return lab.components(strategy.run(lambda: np.float32(1), options=options), strategy)

    for options in (None, kd.RunOptions(), tf_options(True, True, None)):
        lab.equal([1.0, 1.0], run(options))
    with lab.raises(TypeError, r"Expected kerasdist.RunOptions or None. Received: options=\(1,\)"):
        run((1,))
    with lab.raises(TypeError, "Received: experimental_bucketizing_dynamic_shape='yes'"):
        run(tf_options(True, "yes", None))
    with lab.raises(kd.errors.UnsupportedError, "experimental_xla_options='o'.*XLA_FLAGS"):
        run(kd.RunOptions(experimental_xla_options="o"))
