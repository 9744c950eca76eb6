"""By hand on JAX: `jax.distributed`, and `shard_map` around Keras's stateless calls."""

from __future__ import annotations

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from networks import Task

from loops import Place


def keras_model(task: Task, place: Place):
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{place.ports[0]}", place.workers, place.rank)
    import keras

    keras.utils.set_random_seed(0)
    mesh = Mesh(np.array(jax.devices()), ("replica",))
    model = task.network()
    optimizer = keras.optimizers.Adam()
    optimizer.build(model.trainable_variables)

    def loss_of(trainable, non_trainable, x, y):
        logits, non_trainable = model.stateless_call(trainable, non_trainable, x, training=True)
        errors = keras.losses.sparse_categorical_crossentropy(y, logits, from_logits=True)
        return keras.ops.mean(errors), non_trainable

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
    everywhere, divided = NamedSharding(mesh, P()), NamedSharding(mesh, P("replica"))
    state = tuple(
        [
            jax.make_array_from_process_local_data(everywhere, np.asarray(variable.value))
            for variable in group
        ]
        for group in variables
    )
    x, y = task.data()
    batches = [(x[rows], y[rows]) for rows in place.rows_of(task)]

    def work():
        nonlocal state
        for batch in batches:
            inputs = [jax.make_array_from_process_local_data(divided, part) for part in batch]
            state, loss = step(state, *inputs)
        return float(loss)

    return work
