"""What Keras 3.16 does on torch by itself, put into the Keras that is here: two workers.

keras_ddp_script.py FILE: with a file the script makes the default group itself, by that file.
"""

import os
import sys

import keras
import numpy as np
import torch.distributed as dist
from keras.src.backend.torch.trainer import TorchTrainer
from keras.src.trainers.trainer import Trainer

called = []


class Keras316:
    """Of keras/src/backend/torch/trainer.py, where a group is asked for."""

    @staticmethod
    def initialize_ddp(model):
        if dist.is_initialized():
            called.append("wrapped")

    @staticmethod
    def get_metrics_result(model):
        if dist.is_initialized():
            called.append("summed")
        return Trainer.get_metrics_result(model)

    @staticmethod
    def wrapping(make):
        def made(model, force=False):
            model._initialize_ddp()
            return make(model, force)

        return made


TorchTrainer._initialize_ddp = Keras316.initialize_ddp
TorchTrainer.get_metrics_result = Keras316.get_metrics_result
for name in ("make_train_function", "make_test_function", "make_predict_function"):
    setattr(TorchTrainer, name, Keras316.wrapping(getattr(TorchTrainer, name)))

import kerasdist as kd  # noqa: E402  after Keras has become what it is about

if len(sys.argv) > 1:
    rank = int(os.environ["KERASDIST_RANK"])
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=2)


def linear():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", metrics=["mae"])
    return model


x = np.arange(7, dtype="float32")[:, None]
strategy = kd.MultiWorkerMirroredStrategy()
with strategy.scope():
    model = linear()
model.fit(x, x, batch_size=4, verbose=0)
model.train_on_batch(x[:1], x[:1])  # fewer rows than workers: each takes the whole step
model.evaluate(x, x, verbose=0)
model.predict(x, verbose=0)
print("of the strategy:", sorted(set(called)), flush=True)
called.clear()
outside = linear()
if strategy.is_chief or len(sys.argv) > 1:
    outside.evaluate(x, x, verbose=0)
print("of the chief alone:", sorted(set(called)), flush=True)
