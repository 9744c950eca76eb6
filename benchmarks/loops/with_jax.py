"""By hand on JAX: `shard_map` around Keras's stateless calls, on workers or on devices."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from networks import Task

from loops import Place

# With more short programs in flight, JAX may stop for good on several CPU devices.
MOST_IN_FLIGHT = 8


def keras_model(task: Task, place: Place):
    """Workers, by `jax.distributed`."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{place.ports[0]}", place.workers, place.rank)
    state, step, divided = _training(task)
    x, y = task.data()
    batches = [(x[rows], y[rows]) for rows in place.rows_of(task)]

    def work():
        nonlocal state
        for batch in batches:
            inputs = [jax.make_array_from_process_local_data(divided, part) for part in batch]
            state, loss = step(state, *inputs)
        return float(loss)

    return work


def on_devices(task: Task, devices: int):
    """CPU devices of this process."""
    jax.config.update("jax_num_cpu_devices", devices)
    return on_all_devices(task)


def on_all_devices(task: Task):
    """Whatever devices this process has."""
    state, step, _ = _training(task)
    batches = task.batches()

    def work():
        nonlocal state
        for index, batch in enumerate(batches, 1):
            state, loss = step(state, *batch)
            if index % MOST_IN_FLIGHT == 0:
                jax.block_until_ready(loss)
        return float(loss)

    return work


def _training(task: Task) -> tuple[Any, Any, NamedSharding]:
    """Returns the state, the compiled step, and how batches lie on the devices."""
    import keras

    mesh = Mesh(np.array(jax.devices()), ("replica",))
    model = task.model()
    optimizer = keras.optimizers.Adam()
    optimizer.build(model.trainable_variables)

    def loss_of(trainable, non_trainable, x, y):
        predicted, non_trainable = model.stateless_call(trainable, non_trainable, x, training=True)
        return keras.ops.mean(task.errors(y, predicted)), non_trainable

    def mean_of_statistics(value):
        floating = jax.numpy.issubdtype(value.dtype, jax.numpy.floating)
        return jax.lax.pmean(value, "replica") if floating else value

    def replica_step(state, x, y):
        trainable, non_trainable, optimizer_state = state
        (loss, non_trainable), gradients = jax.value_and_grad(loss_of, has_aux=True)(
            trainable, non_trainable, x, y
        )
        loss, gradients = jax.lax.pmean((loss, gradients), "replica")
        non_trainable = [mean_of_statistics(value) for value in non_trainable]
        trainable, optimizer_state = optimizer.stateless_apply(
            optimizer_state, gradients, trainable
        )
        return (trainable, non_trainable, optimizer_state), loss

    step = jax.jit(
        jax.shard_map(
            replica_step,
            mesh=mesh,
            in_specs=(P(), P("replica"), P("replica")),
            out_specs=(P(), P()),
            check_vma=False,
        ),
        donate_argnums=0,
    )
    variables = model.trainable_variables, model.non_trainable_variables, optimizer.variables
    everywhere = NamedSharding(mesh, P())
    state = tuple(
        [
            jax.make_array_from_process_local_data(everywhere, np.asarray(variable.value))
            for variable in group
        ]
        for group in variables
    )
    return state, step, NamedSharding(mesh, P("replica"))
