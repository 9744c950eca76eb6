"""The examples of TPUStrategy that show no TPU: replicas are replicas on any device."""

import collections

import numpy as np

from tests.facade.case import case
from tests.facade.lab import FLOAT32
from tests.facade.lazy import kd, keras, ops


@case
def tpu_strategy__TPUStrategyV2__4(lab):
    """A training step equals the step on both replicas' rows together; then it is called on."""
    strategy = lab.strategy()
    with strategy.scope():
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(2)])
        optimizer = keras.optimizers.SGD(learning_rate=0.1)
        optimizer.build(model.trainable_variables)
    for variable in model.trainable_variables:
        lab.equal(2, len(strategy.experimental_local_results(variable)))

    def dataset_fn(context):
        x = np.random.default_rng(1).random((2, 5)).astype("float32")
        return [(x[:1], np.array([[1]])), (x[1:], np.array([[0]]))] * 3

    def loss_of(model, x, y):
        logits = model(x, training=True)
        return ops.sum(keras.losses.sparse_categorical_crossentropy(y, logits, from_logits=True))

    def step(inputs):
        variables = model.trainable_variables
        value, gradients = kd.value_and_grad(lambda: loss_of(model, *inputs), variables)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return value

    twin = keras.models.clone_model(model)
    twin.set_weights(model.get_weights())
    train = kd.function(lambda batch: strategy.run(step, args=(batch,)))
    losses = []
    for batch in strategy.distribute_datasets_from_function(dataset_fn):
        losses.append(lab.numpy(strategy.reduce("SUM", train(batch), None)))
        x, y = (np.concatenate(lab.components(one, strategy)) for one in batch)
        lab.equal([[1], [0]], y)
        _, gradients = kd.value_and_grad(lambda x=x, y=y: loss_of(twin, x, y), twin.weights)
        keras.optimizers.SGD(learning_rate=0.1).apply(gradients, twin.trainable_variables)
        lab.equal(twin.get_weights(), model.get_weights(), FLOAT32)
    lab.equal(3, len(losses))
    lab.check(losses[-1] < losses[0], f"the loss falls, received {losses}")


@case
def tpu_strategy__TPUStrategyV1_run__5(lab):
    """A compiled step outside and on the replicas, with options that no backend needs."""
    strategy = lab.strategy()
    step = kd.function(ops.sum)
    lab.equal(3.0, step(ops.convert_to_tensor([1.0, 2.0])))
    [batch] = strategy.experimental_distribute_dataset([np.arange(2, dtype="float32")])
    lab.equal([[0.0], [1.0]], lab.components(batch, strategy))
    options = kd.RunOptions(experimental_bucketizing_dynamic_shape=True)
    result = strategy.run(step, args=(batch,), options=options)
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
