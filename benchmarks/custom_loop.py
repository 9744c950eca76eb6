"""What a compiled step of a custom loop costs under a strategy, against the same loop by hand.

    python benchmarks/custom_loop.py [--backends jax torch] [--models tiny] [--rounds 7]

By hand is what a user of the framework would write for two devices: `tf.distribute` on TensorFlow;
`shard_map` around Keras's stateless calls on JAX; two threads with a model each on PyTorch, whose
gradients the main thread adds. Both use the same Keras model and optimizer.
"""

from __future__ import annotations

import argparse
import os
import sys

from alternating import Contender, measure, median, ratio, serve
from rich.console import Console
from rich.table import Table
from workloads import WORKLOADS, Workload, dense_model

BACKENDS = ("tensorflow", "jax", "torch")
CONTENDERS = ("kerasdist", "by hand")
REPLICAS = 2
DEVICES = [f"cpu:{index}" for index in range(REPLICAS)]


def _batches(workload: Workload):
    import numpy as np

    rng = np.random.default_rng(0)
    shapes = (workload.batch, workload.widths[0]), (workload.batch, workload.widths[-1])
    return [
        tuple(rng.normal(size=shape).astype("float32") for shape in shapes)
        for _ in range(workload.steps)
    ]


def _make(backend: str, workload_name: str, contender: str):
    workload = WORKLOADS[workload_name]
    if contender == "kerasdist":
        return _with_kerasdist(workload)
    by_hand = {"tensorflow": _tensorflow_by_hand, "jax": _jax_by_hand, "torch": _torch_by_hand}
    return by_hand[backend](workload)


def _with_kerasdist(workload: Workload):
    import kerasdist as kd

    strategy = kd.MirroredStrategy(DEVICES)
    import keras

    with strategy.scope():
        model = dense_model(workload)
        optimizer = keras.optimizers.Adam(1e-3)
        optimizer.build(model.trainable_variables)

    def replica_step(batch):
        x, y = batch

        def loss():
            errors = keras.ops.mean(keras.ops.square(y - model(x, training=True)), axis=-1)
            return kd.compute_average_loss(errors, global_batch_size=workload.batch)

        value, gradients = kd.value_and_grad(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        return value

    @kd.function
    def step(batch):
        return strategy.reduce("SUM", strategy.run(replica_step, args=(batch,)), axis=None)

    dataset = strategy.distribute_dataset(_batches(workload))

    def work():
        for batch in dataset:
            loss = step(batch)
        return float(loss)

    return work


def _tensorflow_by_hand(workload: Workload):
    import tensorflow as tf

    import kerasdist as kd

    kd.config.set_logical_cpu_devices(REPLICAS)
    strategy = tf.distribute.MirroredStrategy(DEVICES)
    import keras

    with strategy.scope():
        model = dense_model(workload)
        optimizer = keras.optimizers.Adam(1e-3)
        optimizer.build(model.trainable_variables)

    def replica_step(batch):
        x, y = batch
        with tf.GradientTape() as tape:
            errors = tf.reduce_mean(tf.square(y - model(x, training=True)), axis=-1)
            loss = tf.nn.compute_average_loss(errors, global_batch_size=workload.batch)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        return loss

    @tf.function
    def step(batch):
        return strategy.reduce("SUM", strategy.run(replica_step, args=(batch,)), axis=None)

    half = workload.batch // REPLICAS
    batches = _batches(workload)

    def work():
        for batch in batches:
            pieces = strategy.experimental_distribute_values_from_function(
                lambda context, batch=batch: tuple(
                    tf.convert_to_tensor(array[context.replica_id_in_sync_group * half :][:half])
                    for array in batch
                )
            )
            loss = step(pieces)
        return float(loss)

    return work


def _jax_by_hand(workload: Workload):
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    jax.config.update("jax_num_cpu_devices", REPLICAS)
    import keras

    mesh = Mesh(np.array(jax.local_devices()), ("replica",))
    model = dense_model(workload)
    optimizer = keras.optimizers.Adam(1e-3)
    optimizer.build(model.trainable_variables)

    def loss_of(trainable, non_trainable, x, y):
        predicted, non_trainable = model.stateless_call(trainable, non_trainable, x, training=True)
        errors = keras.ops.mean(keras.ops.square(y - predicted), axis=-1)
        return keras.ops.sum(errors) / workload.batch, non_trainable

    def replica_step(state, x, y):
        trainable, non_trainable, optimizer_state = state
        (loss, non_trainable), gradients = jax.value_and_grad(loss_of, has_aux=True)(
            trainable, non_trainable, x, y
        )
        loss, gradients = jax.lax.psum((loss, gradients), "replica")
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
    variables = (
        [v.value for v in model.trainable_variables],
        [v.value for v in model.non_trainable_variables],
        [v.value for v in optimizer.variables],
    )
    state = jax.device_put(variables, NamedSharding(mesh, P()))
    batches = _batches(workload)

    def work():
        nonlocal state
        for index, (x, y) in enumerate(batches):
            state, loss = step(state, x, y)
            if index % 8 == 7:  # or JAX may stop for good on several CPU devices
                jax.block_until_ready(loss)
        return float(loss)

    return work


def _torch_by_hand(workload: Workload):
    from concurrent.futures import ThreadPoolExecutor

    import keras
    import torch

    models = [dense_model(workload) for _ in range(REPLICAS)]
    optimizer = keras.optimizers.Adam(1e-3)
    optimizer.build(models[0].trainable_variables)
    pool = ThreadPoolExecutor(REPLICAS)
    half = workload.batch // REPLICAS
    batches = _batches(workload)

    def replica_step(index, x, y):
        weights = [variable.value for variable in models[index].trainable_variables]
        errors = torch.mean(torch.square(y - models[index](x, training=True)), axis=-1)
        loss = torch.sum(errors) / workload.batch
        return loss.detach(), torch.autograd.grad(loss, weights)

    def work():
        for batch in batches:
            x, y = map(torch.from_numpy, batch)
            parts = [slice(index * half, (index + 1) * half) for index in range(REPLICAS)]
            results = list(
                pool.map(
                    lambda i, x=x, y=y, p=parts: replica_step(i, x[p[i]], y[p[i]]), range(REPLICAS)
                )
            )
            loss = sum(result[0] for result in results)
            first, second = (result[1] for result in results)
            with torch.no_grad():
                gradients = torch._foreach_add(list(first), list(second))
                optimizer.apply(gradients, models[0].trainable_variables)
                torch._foreach_copy_(
                    *([v.value for v in m.trainable_variables] for m in models[::-1])
                )
        return float(loss)

    return work


def main() -> None:
    """Prints one table a backend."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=list(BACKENDS))
    parser.add_argument("--models", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--rounds", type=int, default=7, help="counted rounds of each (at least 5)")
    options = parser.parse_args()
    console = Console(width=110)
    for backend in options.backends:
        title = f"{backend}: a step of a custom loop, {REPLICAS} replicas on {os.cpu_count()} cores"
        table = Table(title=title)
        for column in ("model", "contender", "ms a step", "samples/s", "÷ by hand"):
            table.add_column(column, justify="right" if column not in ("model",) else "left")
        for model in options.models:
            contenders = {name: Contender(__file__, backend, model, name) for name in CONTENDERS}
            figures = measure(contenders, options.rounds)
            for name, values in figures.items():
                step = median(values) / WORKLOADS[model].steps
                table.add_row(
                    model,
                    name,
                    f"{step * 1e3:.3f}",
                    f"{WORKLOADS[model].batch / step:,.0f}",
                    f"{ratio(values, figures['by hand']):.2f}",
                )
        console.print(table)


if __name__ == "__main__":
    if len(sys.argv) == 5 and sys.argv[1] == "--child":
        serve(lambda: _make(*sys.argv[2:]))
    else:
        main()
