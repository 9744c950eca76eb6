"""What code outside of a strategy's scope assigns to variables of workers that are read as sums."""

import numpy as np

from tests.conformance.lazy import keras, tf
from tests.conformance.registry import case


@case("workers")
def of_keras(lab):
    """What code between two loops assigns is what it reads, by Keras's metrics too."""
    with lab.strategy().scope():
        options = {"synchronization": "on_read", "trainable": False}
        total = keras.Variable(np.float32(0), aggregation="sum", **options)
        count = keras.Variable(np.int32(0), dtype="int32", aggregation="sum", **options)
        mean = keras.metrics.Mean()
    for one in (total, count):
        one.assign(3)
        lab.equal(3.0, float(keras.ops.convert_to_numpy(one)))
        one.assign_add(2)
        lab.equal(5.0, float(keras.ops.convert_to_numpy(one)))
    mean.update_state([1.0, 3.0])
    mean.update_state([5.0])
    lab.equal(3.0, float(mean.result()))
    mean.reset_state()
    lab.equal(0.0, float(mean.result()))


@case("workers", backends=("tensorflow",))
def of_tensorflow(lab):
    """TensorFlow adds to its own variables in place."""
    with lab.strategy().scope():
        read = tf.VariableSynchronization.ON_READ
        one = tf.Variable(3.0, synchronization=read, aggregation=tf.VariableAggregation.MEAN)
    one.assign_add(2.0)
    lab.equal(5.0, float(one.read_value()))
    one.assign_sub(1.0)
    lab.equal(4.0, float(one.read_value()))
