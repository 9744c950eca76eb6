"""By hand on TensorFlow: a custom loop under `tf.distribute.MultiWorkerMirroredStrategy`.

After https://www.tensorflow.org/tutorials/distribute/multi_worker_with_ctl: the step takes its
batch from the iterator inside of the compiled function, and the dataset repeats itself. One
iterator lasts for all rounds. On a worker of one core tf.data may take as long as a round to delete
one (kerasdist/backends/tensorflow/private/pipelines.py says why), which is no cost of a step.
"""

from __future__ import annotations

import json
import os

import tensorflow as tf
from networks import Task

from loops import Place


def keras_model(task: Task, place: Place):
    addresses = [f"localhost:{port}" for port in place.ports]
    os.environ["TF_CONFIG"] = json.dumps(
        {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": place.rank}}
    )
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    import keras

    with strategy.scope():
        model = task.model()
        optimizer = keras.optimizers.Adam()
        optimizer.build(model.trainable_variables)

    def replica_step(batch):
        x, y = batch
        with tf.GradientTape() as tape:
            errors = task.errors(y, model(x, training=True))
            loss = tf.nn.compute_average_loss(errors, global_batch_size=task.batch)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        return loss

    @tf.function
    def step(batches):
        losses = strategy.run(replica_step, args=(next(batches),))
        return strategy.reduce("SUM", losses, axis=None)

    arrays = task.data()

    def own_rows(context):
        size = context.get_per_replica_batch_size(task.batch)
        rows = [tf.concat([a[each] for each in place.rows_of(task)], axis=0) for a in arrays]
        return tf.data.Dataset.from_tensor_slices(tuple(rows)).batch(size).repeat().prefetch(2)

    batches = iter(strategy.distribute_datasets_from_function(own_rows))

    def work():
        for _ in range(task.steps):
            loss = step(batches)
        return float(loss)

    return work
