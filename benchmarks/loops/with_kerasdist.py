"""By kerasdist: `fit`, and a compiled custom loop."""

from __future__ import annotations

from collections.abc import Callable

from networks import Task

from loops import Place


def _strategy(**options: str):
    import kerasdist as kd

    return kd.MultiWorkerMirroredStrategy(**options)


def fit(task: Task, place: Place, on_batch: Callable[..., object] | None = None, **options: str):
    del place  # the strategy finds it in the environment
    import keras

    callbacks = [keras.callbacks.LambdaCallback(on_train_batch_end=on_batch)] if on_batch else []
    with _strategy(**options).scope():
        model = task.model()
        model.compile("adam", task.loss())
    x, y = task.data()

    def work():
        history = model.fit(
            x, y, batch_size=task.batch, shuffle=False, verbose=0, callbacks=callbacks
        )
        return history.history["loss"][-1]

    return work


def fit_with_callback(task: Task, place: Place):
    """With a callback in each step that reads no logs."""
    return fit(task, place, on_batch=lambda batch, logs: None)


def fit_with_logs_read(task: Task, place: Place):
    """With a callback in each step that reads its loss."""
    return fit(task, place, on_batch=lambda batch, logs: float(logs["loss"]))


def fit_per_replica(task: Task, place: Place):
    """Batch normalization of each worker's own rows, as the loops by hand have it."""
    return fit(task, place, batch_norm="per_replica")


def fit_sharded_optimizer(task: Task, place: Place):
    """`sharding="optimizer"`."""
    return fit(task, place, sharding="optimizer")


def fit_fully_sharded(task: Task, place: Place):
    """`sharding="full"`."""
    return fit(task, place, sharding="full")


def loop(task: Task, place: Place):
    del place
    strategy = _strategy()
    import keras

    import kerasdist as kd

    with strategy.scope():
        model = task.model()
        optimizer = keras.optimizers.Adam()
        optimizer.build(model.trainable_variables)

    def replica_step(batch):
        x, y = batch

        def loss():
            errors = task.errors(y, model(x, training=True))
            return kd.compute_average_loss(errors, global_batch_size=task.batch)

        value, gradients = kd.value_and_grad(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        return value

    @kd.function
    def step(batch):
        return strategy.reduce("SUM", strategy.run(replica_step, args=(batch,)), axis=None)

    dataset = strategy.distribute_dataset(task.batches())

    def work():
        for batch in dataset:
            loss = step(batch)
        return float(loss)

    return work
