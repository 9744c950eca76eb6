"""The time of a compiled step of a custom loop under a strategy, and in a hand-written loop.

    python benchmarks/custom_loop.py [--backends jax torch] [--tasks tiny] [--rounds 7]

"by hand" is the loop that a user of the framework would write for two devices. On TensorFlow it
uses `tf.distribute`; on JAX it uses `shard_map` around Keras's stateless calls. On PyTorch two
threads have a model each, and the main thread adds the gradients of both models. kerasdist and the
hand-written loop use the same Keras model and optimizer.
"""

from __future__ import annotations

import argparse
import os
import sys

from alternating import Contender, measure, median, serve, shown_ratio
from networks import TASKS, Task
from rich.console import Console
from rich.table import Table

BACKENDS = ("tensorflow", "jax", "torch")
CONTENDERS = ("kerasdist", "by hand")
REPLICAS = 2
DEVICES = [f"cpu:{index}" for index in range(REPLICAS)]


def _make(backend: str, name: str, contender: str):
    task = TASKS[name]
    if contender == "kerasdist":
        return _with_kerasdist(task)
    by_hand = {"tensorflow": _tensorflow_by_hand, "jax": _jax_by_hand, "torch": _torch_by_hand}
    return by_hand[backend](task)


def _with_kerasdist(task: Task):
    import kerasdist as kd

    strategy = kd.MirroredStrategy(DEVICES)
    import keras

    with strategy.scope():
        model = task.model()
        optimizer = keras.optimizers.Adam(1e-3)
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


def _tensorflow_by_hand(task: Task):
    import tensorflow as tf

    import kerasdist as kd

    kd.config.set_logical_cpu_devices(REPLICAS)
    strategy = tf.distribute.MirroredStrategy(DEVICES)
    import keras

    with strategy.scope():
        model = task.model()
        optimizer = keras.optimizers.Adam(1e-3)
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
    def step(batch):
        return strategy.reduce("SUM", strategy.run(replica_step, args=(batch,)), axis=None)

    half = task.batch // REPLICAS
    batches = task.batches()

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


def _jax_by_hand(task: Task):
    from loops.with_jax import on_devices

    return on_devices(task, REPLICAS)


def _torch_by_hand(task: Task):
    from concurrent.futures import ThreadPoolExecutor

    import keras
    import torch

    models = [task.model() for _ in range(REPLICAS)]
    optimizer = keras.optimizers.Adam(1e-3)
    optimizer.build(models[0].trainable_variables)
    pool = ThreadPoolExecutor(REPLICAS)
    half = task.batch // REPLICAS
    batches = task.batches()

    def replica_step(index, x, y):
        weights = [variable.value for variable in models[index].trainable_variables]
        errors = task.errors(y, models[index](x, training=True))
        loss = torch.sum(errors) / task.batch
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
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=["tiny", "mlp"])
    parser.add_argument("--rounds", type=int, default=7, help="counted rounds of each (at least 5)")
    options = parser.parse_args()
    console = Console(width=110)
    for backend in options.backends:
        title = f"{backend}: a step of a custom loop, {REPLICAS} replicas on {os.cpu_count()} cores"
        table = Table(title=title)
        for column in ("task", "contender", "ms a step", "samples/s", "÷ by hand"):
            table.add_column(column, justify="right" if column not in ("task",) else "left")
        for task in options.tasks:
            contenders = {name: Contender(__file__, backend, task, name) for name in CONTENDERS}
            figures = measure(contenders, options.rounds)
            for name, values in figures.items():
                step = median(values) / TASKS[task].steps
                table.add_row(
                    task,
                    name,
                    f"{step * 1e3:.3f}",
                    f"{TASKS[task].batch / step:,.0f}",
                    shown_ratio(values, figures["by hand"]),
                )
        console.print(table)


if __name__ == "__main__":
    if len(sys.argv) == 5 and sys.argv[1] == "--child":
        serve(lambda: _make(*sys.argv[2:]))
    else:
        main()
