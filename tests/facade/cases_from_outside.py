"""Custom loops of models, optimizers and metrics that were made outside of the scope."""

import contextlib
from functools import partial

import numpy as np

from tests.conformance.compare import ADAPTIVE
from tests.conformance.lazy import keras
from tests.facade.case import case
from tests.facade.cases_training import Loop, batched, dense, rows
from tests.facade.lab import FLOAT32


def parts(strategy, model_in, optimizer_in, built_by_hand=False):
    with strategy.scope() if model_in else contextlib.nullcontext():
        model = dense()
    with strategy.scope() if optimizer_in else contextlib.nullcontext():
        optimizer = keras.optimizers.Adam(0.01)
    if built_by_hand:
        with strategy.scope():
            optimizer.build(model.trainable_variables)
    return model, optimizer


@case
def loops_of_parts_from_outside(lab):
    """A custom loop with a model or optimizer made outside of the scope equals plain Keras."""
    batches = batched(rows(20), 5)
    loop = Loop(optimizer=lambda: keras.optimizers.Adam(0.01), compiled=False)
    expected = loop.plain(batches)
    for made in (
        partial(parts, model_in=True, optimizer_in=False),
        partial(parts, model_in=False, optimizer_in=True),
        partial(parts, model_in=False, optimizer_in=False),
        partial(parts, model_in=False, optimizer_in=False, built_by_hand=True),
    ):
        lab.equal(expected, loop.under(lab.strategy(), batches, made), ADAPTIVE)
    compiled = Loop(optimizer=loop.optimizer)
    made = partial(parts, model_in=False, optimizer_in=False)
    lab.equal(expected, compiled.under(lab.strategy(), batches, made), ADAPTIVE)


@case
def statistics_from_outside(lab):
    """A BatchNormalization or metric made outside of the scope trains as if made inside."""

    def trained(inside):
        keras.backend.clear_session(free_memory=False)
        strategy = lab.strategy()
        with strategy.scope() if inside else contextlib.nullcontext():
            norm = keras.layers.BatchNormalization(momentum=0.5)
            norm.build((None, 4))
            metric = keras.metrics.MeanSquaredError()
            metric.update_state([[1.0]], [[3.0]])  # a state from before

        def step(part):
            metric.update_state(part, norm(part, training=True))

        rows = np.random.default_rng(0).normal(size=(2 * lab.replicas, 4)).astype("float32")
        for batch in strategy.distribute_dataset([rows, 2 * rows]):
            strategy.run(step, args=(batch,))
        strategy.run(lambda: norm(rows))
        return [norm.moving_mean, norm.moving_variance, norm(rows), metric.result()]

    lab.equal(lab.numpy(trained(True)), lab.numpy(trained(False)), FLOAT32)
