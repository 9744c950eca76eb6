"""What recent versions of Keras brought: distillation, quantization, Orbax, nnx's variables."""

import contextlib
import functools
import sys
import tempfile
from unittest import mock

import numpy as np

from tests.conformance.actions import evaluate, fit, predict
from tests.conformance.compare import Tolerance
from tests.conformance.lab import fresh
from tests.conformance.lazy import kd, keras
from tests.conformance.models import compiled, dense, regression, stack
from tests.conformance.registry import case

N, BATCH = 11, 6
X, Y = regression(N)
TOPIC = "newer parts of Keras"
# Relative to a loss: gradients are rounded to an eighth of themselves, each another way.
FLOAT8 = Tolerance(0.05, 0.0, "float8 gradients have 2 bits of mantissa")


@case(TOPIC, replicas=(2,))
def distiller(lab):
    """`keras.distillation.Distiller`: the student learns, the teacher stays."""

    def build():
        teacher, student = (
            stack([keras.layers.Dense(units, activation="tanh"), keras.layers.Dense(1)])
            for units in (6, 3)
        )
        model = keras.distillation.Distiller(
            teacher=teacher,
            student=student,
            distillation_losses=keras.distillation.LogitsDistillation(loss="mse"),
        )
        return compiled(model, keras.optimizers.SGD(0.1), "mse")

    lab.same(build, fit(X, Y, batch_size=BATCH, epochs=2), evaluate(X, Y, batch_size=BATCH))


def quantized(mode):
    def build():
        model = dense()
        model.quantize(mode)
        return compiled(model, keras.optimizers.SGD(0.1), "mse")

    return build


@case(TOPIC, replicas=(2,))
def quantized_int8(lab):
    """`model.quantize("int8")`, then `evaluate`, `predict`, and `fit` of what is left to train."""

    lab.same(
        quantized("int8"),
        evaluate(X, Y, batch_size=BATCH),
        predict(X, batch_size=BATCH),
        fit(X, Y, batch_size=BATCH, epochs=2),
    )


def quantize(model, mode):
    model.quantize(mode)


def saved_and_loaded(model):
    """What a plain model predicts that was loaded from the model's file."""
    with tempfile.TemporaryDirectory() as folder:
        model.save(f"{folder}/model.keras")
        loaded = keras.models.load_model(f"{folder}/model.keras")
    return loaded.predict(X, batch_size=BATCH, verbose=0)


@case(TOPIC, replicas=(2,))
def quantized_out_of_the_scope(lab):
    """A model that was made in a scope, quantised out of it: `"int8"` and `"int4"`, and saved."""
    for mode in ("int8", "int4"):
        lab.same(
            dense,
            functools.partial(quantize, mode=mode),
            predict(X, batch_size=BATCH),
            fit(X, Y, batch_size=BATCH),
            evaluate(X, Y, batch_size=BATCH),
            saved_and_loaded,
        )


@case(TOPIC, replicas=(2,))
def quantized_by_examples(lab):
    """`GPTQConfig`: weights rounded by what examples show; `predict`, `evaluate`, saved."""
    ids = np.arange(88).reshape(11, 8) % 20

    def build():
        embedding = keras.layers.Embedding(20, 8)
        blocks = [keras.layers.Dense(8, activation="tanh") for _ in range(2)]
        inputs = keras.Input((8,), dtype="int32")
        return stack([embedding, *blocks, keras.layers.Dense(1)], "sgd", inputs=inputs)

    def quantize(model):
        embedding, *blocks, _ = model.layers[-4:]
        layers = {"pre_block_layers": [embedding], "sequential_blocks": blocks}
        options = {"num_samples": 4, "sequence_length": 8, "group_size": 8}
        config = keras.quantizers.GPTQConfig(
            [ids[:4]], str, quantization_layer_structure=layers, **options
        )
        model.quantize(config=config)

    wanted = ids[..., None] / 20.0
    options = {"batch_size": BATCH}
    lab.same(build, quantize, predict(ids, **options), evaluate(ids, wanted, **options))


@case(TOPIC, replicas=(2,), like="newer_keras.quantized_int8")
def quantized_float8(lab):
    """`model.quantize("float8")`, then `predict` and `fit`."""

    build = quantized("float8")
    lab.same(build, predict(X, batch_size=BATCH))
    # Trained, the ranges of gradients differ as docs/numerics.md says.
    _, expected = lab.run(build, (fit(X, Y, batch_size=BATCH, epochs=2),))
    _, actual = lab.run(build, (fit(X, Y, batch_size=BATCH, epochs=2),), lab.strategy())
    losses = [one.results[0]["history"]["history"]["loss"] for one in (expected, actual)]
    lab.equal(*losses, FLOAT8)


@case(
    TOPIC,
    backends=("jax",),
    replicas=(2,),
    refused={"jax": ("UnsupportedError", "Received: nnx_enabled=True. Unset KERAS_NNX_ENABLED")},
)
def nnx_mode(lab):
    """`KERAS_NNX_ENABLED`: Keras's variables are Flax's."""
    with mock.patch.object(keras.config, "is_nnx_enabled", return_value=True):
        lab.strategy()


@case(TOPIC, replicas=(2,))
def orbax_checkpoint(lab):
    """`keras.callbacks.OrbaxCheckpoint` in one process: what Orbax gets is one device's state."""
    if "OrbaxCheckpoint" not in dir(keras.callbacks):  # before Keras 3.13
        return
    callbacks = sys.modules[keras.callbacks.OrbaxCheckpoint.__module__]
    saved, to_numpy = [], keras.ops.convert_to_numpy

    class Checkpointer:
        def save_checkpointables(self, step, payload):
            saved.append([step, keras.tree.map_structure(to_numpy, payload["pytree"])])

        def close(self):
            saved.append("closed")

    orbax = mock.MagicMock()
    orbax.training.Checkpointer.return_value = Checkpointer()
    orbax.multihost.is_jax_distributed_client_initialized.return_value = False
    each = []
    with mock.patch.object(callbacks, "ocp", orbax):
        for strategy in (None, lab.strategy()):
            fresh()  # equal names
            with strategy.scope() if strategy else contextlib.nullcontext():
                keras.utils.set_random_seed(3)
                model = dense("adam")
            orbax_callback = keras.callbacks.OrbaxCheckpoint("unused", save_on_background=False)
            model.fit(X, Y, batch_size=BATCH, epochs=2, verbose=0, callbacks=[orbax_callback])
            each.append([*saved])
            saved.clear()
    plain, ours = each
    assert plain[-1] == ours[-1] == "closed"
    assert [step for step, _ in ours[:-1]] == [0, 1]
    lab.equal([state for _, state in plain[:-1]], [state for _, state in ours[:-1]])


@case(TOPIC, replicas=(2,))
def one_distribution(lab):
    """`keras.distribution.set_distribution` beside a strategy is refused, before any step.

    Models outside of the scope train under it as without a strategy.
    """
    model = lab.made(dense)
    before = model.get_weights()
    theirs, layouts = _distributions()
    for given in filter(None, (theirs, layouts)):
        with lab.raises(ValueError, "Pass the layout_map of a keras.distribution.ModelParallel"):
            kd.MirroredStrategy(["cpu:0", "cpu:1"], sharding=given)
    with lab.raises(kd.errors.DeviceError, "Expected a list of the names of devices"):
        kd.MirroredStrategy(theirs)
    alone = _trained_weights()
    keras.distribution.set_distribution(theirs)
    try:
        for call in (
            lambda: model.fit(X, Y, verbose=0),
            lambda: model.evaluate(X, Y, verbose=0),
            lambda: model.predict(X, verbose=0),
            lambda: model.train_on_batch(X, Y),
        ):
            with lab.raises(kd.errors.UnsupportedError, "one distribution.*set_distribution.None"):
                call()
        if layouts:  # of this version of Keras
            lab.equal(alone, _trained_weights())
    finally:
        keras.distribution.set_distribution(None)
    lab.equal(before, model.get_weights())
    model.fit(X, Y, verbose=0)


def _distributions():
    """Keras's own data and model parallelism; before Keras 3.16 it has none on PyTorch."""
    own = keras.distribution
    if keras.backend.backend() == "torch":
        return object(), None
    devices = own.list_devices()[:2]
    layouts = own.LayoutMap(own.DeviceMesh((1, 2), ("batch", "model"), devices))
    return own.DataParallel(devices=devices), own.ModelParallel(layout_map=layouts)


def _trained_weights():
    fresh()
    keras.utils.set_random_seed(3)
    model = dense("adam")
    # Keras's own on JAX divides whole batches alone.
    model.fit(X[:8], Y[:8], batch_size=4, epochs=2, shuffle=False, verbose=0)
    return model.get_weights()
