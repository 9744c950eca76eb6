"""Strategies of one device give the numbers of plain Keras on that device."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from smoke.models import BATCH, EXAMPLES, SEED, difference, exact, outcome, weights

MOST = {"float32": 1e-4, "mixed_bfloat16": 3e-2, "mixed_float16": 3e-2}
DROPOUT = 0.3


def device(kind: str) -> dict[str, Any]:
    """The machine: versions, and the device."""
    import platform

    import keras

    import kerasdist as kd

    found = {
        "python": platform.python_version(),
        "keras": keras.__version__,
        "kerasdist": kd.__version__,
    }
    from kerasdist.backends import registry

    devices = registry.current().devices(kind)
    if not devices:
        return {
            **found,
            "skipped": f"{keras.backend.backend()} sees no {kind.upper()}: nothing ran",
        }
    if keras.backend.backend() == "torch" and kind == "gpu":
        import torch

        found["name"] = torch.cuda.get_device_name(0)
    return {**found, "devices": [str(one) for one in devices]}


def _strategies(kind: str) -> Iterator[tuple[str, Any]]:
    import kerasdist as kd

    yield "one device", kd.OneDeviceStrategy(f"{kind}:0")
    yield "mirrored", kd.MirroredStrategy([f"{kind}:0"])


def _fit(name: str, policy: str, kind: str) -> dict[str, Any]:
    """`fit`, `evaluate` and `predict`, with dropout and a last batch of two rows."""
    import keras

    exact()
    keras.config.set_dtype_policy(policy)
    example = EXAMPLES[name]
    x, y = example.data()

    def trained(scope: Any) -> dict[str, Any]:
        with scope:
            model = example.compiled(DROPOUT)
        return outcome(model, x, y)

    plain = trained(nullcontext())
    return {
        "largest difference": {
            label: difference(plain, trained(strategy.scope()), MOST[policy])
            for label, strategy in _strategies(kind)
        }
    }


def _custom_loop(kind: str) -> dict[str, Any]:
    """`kd.function`, `run` and `reduce` give what the default strategy gives."""
    import keras

    import kerasdist as kd

    exact()
    example = EXAMPLES["mlp"]
    x, y = example.data()

    def trained(strategy: Any) -> dict[str, Any]:
        with strategy.scope():
            model = example.compiled()
            optimizer = keras.optimizers.Adam(1e-2)
            optimizer.build(model.trainable_variables)

        def replica_step(inputs: Any, labels: Any) -> Any:
            def loss() -> Any:
                errors = keras.losses.sparse_categorical_crossentropy(
                    labels, model(inputs, training=True), from_logits=True
                )
                return kd.compute_average_loss(errors, global_batch_size=BATCH)

            value, gradients = kd.value_and_grad(loss, model.trainable_variables)
            optimizer.apply(gradients, model.trainable_variables)
            return value

        @kd.function
        def step(inputs: Any, labels: Any) -> Any:
            return strategy.reduce("SUM", strategy.run(replica_step, (inputs, labels)), axis=None)

        ends = range(BATCH, len(x), BATCH)
        losses = [step(*_rows(strategy, x, y, end)) for end in ends]
        return {"losses": [float(loss) for loss in losses], **weights(model)}

    plain = _as_arrays(trained(kd.get_strategy()))
    return {
        "largest difference": {
            label: difference(plain, _as_arrays(trained(strategy)), MOST["float32"])
            for label, strategy in _strategies(kind)
        }
    }


def _rows(strategy: Any, x: Any, y: Any, end: int) -> tuple[Any, ...]:
    begin = end - BATCH
    return tuple(
        strategy.experimental_distribute_values_from_function(
            lambda _, array=array: array[begin:end]
        )
        for array in (x, y)
    )


def _as_arrays(found: dict[str, Any]) -> dict[str, Any]:
    import numpy as np

    return {name: np.asarray(value) for name, value in found.items()}


def _restart(kind: str) -> dict[str, Any]:
    """A run that is interrupted and goes on ends with the numbers of one that is not."""
    import keras

    import kerasdist as kd

    exact()
    example = EXAMPLES["cnn"]
    x, y = example.data()

    class Interrupted(Exception):  # noqa: N818  it is wanted
        pass

    class Interrupt(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            if self.model.optimizer.iterations == 6:
                raise Interrupted

    def trained(strategy: Any, seed: int, *callbacks: Any) -> dict[str, Any]:
        with strategy.scope():
            model = example.compiled(DROPOUT)
        keras.utils.set_random_seed(seed)
        try:
            model.fit(x, y, batch_size=BATCH, epochs=3, verbose=0, callbacks=list(callbacks))
        except Interrupted:
            return {}
        return weights(model)

    figures = {}
    for label, strategy in _strategies(kind):
        whole = trained(strategy, SEED)
        with tempfile.TemporaryDirectory() as folder:
            backup = partial(kd.callbacks.BackupAndRestore, folder, save_freq=1)
            if trained(strategy, SEED, backup(), Interrupt()):
                raise AssertionError("Expected the run to be interrupted.")
            figures[label] = difference(whole, trained(strategy, SEED, backup()), MOST["float32"])
    return {"largest difference": figures}


def _steps_per_execution(kind: str) -> dict[str, Any]:
    """Several steps in one call give what single steps give."""
    exact()
    example = EXAMPLES["mlp"]
    x, y = example.data()

    def trained(scope: Any, steps: int) -> dict[str, Any]:
        with scope:
            model = example.compiled()
            model.steps_per_execution = steps
        return outcome(model, x, y)

    plain = trained(nullcontext(), 1)
    return {
        "largest difference": {
            label: difference(plain, trained(strategy.scope(), 3), MOST["float32"])
            for label, strategy in _strategies(kind)
        }
    }


def _save_and_load(kind: str) -> dict[str, Any]:
    """What is saved under a strategy loads without one, and predicts the same."""
    import keras

    exact()
    example = EXAMPLES["cnn"]
    x, y = example.data()
    figures = {}
    for label, strategy in _strategies(kind):
        with strategy.scope():
            model = example.compiled()
        outcome(model, x, y)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.keras"
            model.save(path)
            loaded = keras.models.load_model(path)
        predicted = [{"predict": one.predict(x, verbose=0)} for one in (model, loaded)]
        figures[label] = difference(*predicted, MOST["float32"])
    return {"largest difference": figures}


PARTS: dict[str, Callable[[str], dict[str, Any]]] = {
    "device": device,
    **{f"correctness.{name}": partial(_fit, name, "float32") for name in EXAMPLES},
    **{
        f"correctness.cnn.{policy}": partial(_fit, "cnn", policy)
        for policy in ("mixed_bfloat16", "mixed_float16")
    },
    "correctness.custom_loop": _custom_loop,
    "correctness.restart": _restart,
    "correctness.steps_per_execution": _steps_per_execution,
    "correctness.save_and_load": _save_and_load,
}
