"""By kerasdist: `fit`, and a compiled custom loop."""

from __future__ import annotations

from networks import Task

from loops import Place


def _strategy(**options: str):
    import keras

    import kerasdist as kd

    strategy = kd.MultiWorkerMirroredStrategy(**options)
    keras.utils.set_random_seed(0)
    return strategy


def fit(task: Task, place: Place):
    del place  # the strategy finds it in the environment
    import keras

    # As the loops by hand have it, and custom loops. On JAX it is always that of the global batch.
    on_jax = keras.backend.backend() == "jax"
    strategy = _strategy() if on_jax else _strategy(batch_norm="per_replica")

    with strategy.scope():
        model = task.network()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss)
    x, y = task.data()

    def work():
        history = model.fit(x, y, batch_size=task.batch, shuffle=False, verbose=0)
        return history.history["loss"][-1]

    return work


def loop(task: Task, place: Place):
    del place
    strategy = _strategy()
    import keras

    import kerasdist as kd

    ops = keras.ops
    with strategy.scope():
        model = task.network()
        optimizer = keras.optimizers.Adam()
        optimizer.build(model.trainable_variables)

    def replica_step(batch):
        x, y = batch

        def loss():
            errors = keras.losses.sparse_categorical_crossentropy(
                y, model(x, training=True), from_logits=True
            )
            errors = ops.mean(ops.reshape(errors, (ops.shape(errors)[0], -1)), axis=-1)
            return kd.compute_average_loss(errors, global_batch_size=task.batch)

        value, gradients = kd.value_and_grad(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        return value

    @kd.function
    def step(batch):
        return strategy.reduce("SUM", strategy.run(replica_step, args=(batch,)), axis=None)

    x, y = task.data()
    bounds = range(0, len(x), task.batch)
    dataset = strategy.distribute_dataset(
        [(x[begin : begin + task.batch], y[begin : begin + task.batch]) for begin in bounds]
    )

    def work():
        for batch in dataset:
            loss = step(batch)
        return float(loss)

    return work
