"""Where a training step makes the host wait for a GPU, found on the CPU.

It says, for a step of `fit` and one of a custom loop, how often a Python number was copied to a
device (torch then waits for all work of the device) or the host read a tensor, by the place that
does it.
"""

import collections
import json
import os
import traceback
from pathlib import Path
from typing import Any

import keras
import numpy as np
import torch

import kerasdist as kd
from tests.gpu_like import emulation

COPIED = ((torch, "as_tensor"), (torch, "tensor"), (torch.Tensor, "new_tensor"))
READ = ("item", "tolist", "__bool__", "__float__", "__int__", "numpy", "cpu")
# Functions that convert or compute what others ask them to.
SERVING = ("src/backend", "src/ops", "src/utils", "keras_compat/patches", "torch/fit/updates")


class Counter:
    def __init__(self):
        self.is_on = False
        self.found: collections.Counter[str] = collections.Counter()
        for owner, name in COPIED:
            self._watch(owner, name, copied=True)
        for name in READ:
            self._watch(torch.Tensor, name, copied=False)

    def _watch(self, owner: Any, name: str, *, copied: bool):
        original = getattr(owner, name)

        def watched(*args, **kwargs):
            data = args[owner is torch.Tensor] if copied else None
            if self.is_on and not isinstance(data, torch.Tensor):
                self.found[f"{name} in {place()}"] += 1
            was_on, self.is_on = self.is_on, False  # one of these functions may call another
            try:
                return original(*args, **kwargs)
            finally:
                self.is_on = was_on

        setattr(owner, name, watched)

    def take(self) -> dict[str, int]:
        self.is_on = False
        found, self.found = self.found, collections.Counter()
        return dict(found)


def place() -> str:
    """The innermost function that wanted it, of kerasdist, Keras or this file."""
    for frame in reversed(traceback.extract_stack()[:-2]):
        path = frame.filename.rpartition("site-packages/")[2]
        ours = path.rpartition("/kerasdist/")[2] if "/kerasdist/" in path else path
        if not path.startswith("torch/") and not any(one in path for one in SERVING):
            return f"{Path(ours).as_posix()}:{frame.name}"
    return "?"


def model() -> Any:
    layers = keras.layers
    hidden = [layers.Conv2D(4, 3), layers.BatchNormalization(), layers.ReLU(), layers.Dropout(0.1)]
    last = [layers.GlobalAveragePooling2D(), layers.Dense(4)]
    made = keras.Sequential([keras.Input((8, 8, 3)), *hidden, *last])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    made.compile(keras.optimizers.Adam(), loss, metrics=["accuracy"])
    return made


class InStep(keras.callbacks.Callback):
    """Counts in the fourth step."""

    def __init__(self, counter: Counter):
        super().__init__()
        self._counter = counter

    def on_train_batch_begin(self, batch: int, logs: Any = None):
        self._counter.is_on = batch == 3

    def on_train_batch_end(self, batch: int, logs: Any = None):
        self._counter.is_on = False


def in_fit(counter: Counter, used: Any) -> dict[str, int]:
    x = np.ones((40, 8, 8, 3), "float32")
    with used.scope():
        trained = model()
    trained.fit(x, np.zeros(40, "int32"), batch_size=8, verbose=0, callbacks=[InStep(counter)])
    return counter.take()


def in_loop(counter: Counter, used: Any) -> dict[str, int]:
    with used.scope():
        trained = model()
        per_example = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)

    def step(x: Any, y: Any) -> Any:
        def loss() -> Any:
            losses = per_example(y, trained(x, training=True))
            return kd.compute_average_loss(losses, global_batch_size=8)

        value, gradients = kd.value_and_grad(loss, trained.trainable_variables)
        trained.optimizer.apply(gradients, trained.trainable_variables)
        return value

    x, y = torch.ones(8, 8, 8, 3), torch.zeros(8, dtype=torch.int32)
    for number in range(3):
        counter.is_on = number == 2
        used.reduce("SUM", used.run(step, args=(x, y)), axis=None)
    return counter.take()


def of_step(counter: Counter, used: Any) -> dict[str, dict[str, int]]:
    return {"fit": in_fit(counter, used), "loop": in_loop(counter, used)}


def main():
    """Prints it: in a worker that of the worker, else that of plain Keras and of threads."""
    is_worker = "KERASDIST_RANK" in os.environ
    if is_worker:
        kd.MultiWorkerMirroredStrategy()  # connects, before devices look like others
    emulation.install("torch")
    counter = Counter()
    if is_worker:
        found = {"worker": of_step(counter, kd.MultiWorkerMirroredStrategy())}  # like a GPU's
    else:
        plain = of_step(counter, kd.OneDeviceStrategy("cpu:0"))
        threads = kd.MirroredStrategy(["cpu:0", "cpu:1"])
        found = {"plain": plain, "threads": of_step(counter, threads)}
    print(json.dumps(found), flush=True)
