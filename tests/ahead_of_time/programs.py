"""Compiles `fit` for a platform that is not there, and prints one JSON line per program.

    python -m tests.ahead_of_time.programs tpu [name ...]

XLA compiles for a described topology: four chips of a TPU v5e with ``libtpu``, eight H100 with the
plug-in for CUDA. The program is the one that `fit` runs, in `MeshPlacement.compile`.
"""

import collections
import json
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import keras
import numpy as np
from jax.experimental import topologies

import kerasdist as kd
from kerasdist import keras_compat
from kerasdist.backends.jax.layout import Layout
from kerasdist.backends.jax.placement import MeshPlacement
from kerasdist.backends.jax.steps import Execution, StepFunction

L = keras.layers
CLASSES = 8
COLLECTIVES = "all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter"


def topology(platform: str) -> list[Any]:
    """The devices of a platform."""
    if platform == "tpu":
        return topologies.get_topology_desc("v5e:2x2", platform="tpu").devices
    target = Path(__file__).with_name("h100.txtpb").read_text("utf-8")
    shape = "1x1x8"
    return topologies.get_topology_desc(
        shape, platform="cuda", topology=shape, target_config=target
    ).devices


def mlp() -> keras.Model:
    hidden = [L.Dense(256, "relu"), L.Dropout(0.1), L.Dense(256, "relu")]
    return keras.Sequential([keras.Input((128,)), *hidden, L.Dense(CLASSES)])


def convolutions() -> keras.Model:
    block = [
        layer
        for _ in range(2)
        for layer in (L.Conv2D(16, 3, use_bias=False), L.BatchNormalization(), L.ReLU())
    ]
    return keras.Sequential(
        [keras.Input((16, 16, 3)), *block, L.GlobalAveragePooling2D(), L.Dense(CLASSES)]
    )


def transformer() -> keras.Model:
    x = inputs = keras.Input((16, 64))
    for _ in range(2):
        h = L.LayerNormalization()(x)
        x = L.Add()([x, L.MultiHeadAttention(4, 16)(h, h)])
        h = L.LayerNormalization()(x)
        x = L.Add()([x, L.Dense(64)(L.Dense(256, "gelu")(h))])
    return keras.Model(inputs, L.Dense(CLASSES)(L.GlobalAveragePooling1D()(x)))


def recurrent() -> keras.Model:
    return keras.Sequential([keras.Input((12, 16)), L.LSTM(32, dropout=0.1), L.Dense(CLASSES)])


@dataclass(frozen=True)
class Program:
    """What to train, and how."""

    build: Callable[[], keras.Model] = mlp
    batch: int = 64
    clipnorm: float | None = None
    steps: int = 1
    policy: str = "float32"
    logical_devices: int = 1
    splits: dict[str, tuple[int, int]] = field(default_factory=dict)


PROGRAMS = {
    "mlp": Program(),
    "mlp, uneven batch": Program(batch=62),
    "mlp, 8 steps an execution": Program(steps=8),
    "mlp, clipnorm": Program(clipnorm=1.0),
    "mlp, 2 logical devices": Program(logical_devices=2, splits={r"dense.*/kernel": (1, 2)}),
    "convolutions with BatchNormalization": Program(convolutions),
    "transformer in bfloat16": Program(transformer, batch=32, policy="mixed_bfloat16"),
    "LSTM": Program(recurrent, batch=32),
}


class _Lowered(Exception):
    pass


def lowered(program: Program, devices: list[Any]) -> Any:
    """The program as `fit` gives it to XLA, and the number of arrays in its state."""
    keras.backend.clear_session()
    keras.config.set_dtype_policy(program.policy)
    with kd.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        model = program.build()
        optimizer = keras.optimizers.Adam(clipnorm=program.clipnorm)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss, metrics=["accuracy"])
        x = np.zeros((program.batch, *model.input_shape[1:]), "float32")
        y = np.zeros(program.batch, "int32")
        model._symbolic_build(data_batch=(x, y))
        optimizer.build(model.trainable_variables)
    layout = Layout(devices, program.logical_devices)
    if program.splits:
        layout.split_variables(program.splits)
    placement = MeshPlacement(layout)
    state = [
        [jax.ShapeDtypeStruct(one.shape, one.dtype, sharding=how) for one, how in pairs]
        for pairs in _state(model, layout)
    ]
    lead = (program.steps,) if program.steps > 1 else ()
    batch = tuple(jax.ShapeDtypeStruct((*lead, *one.shape), one.dtype) for one in (x, y))
    function = StepFunction(model.train_step, placement, Execution(True, program.steps))
    jit = jax.jit

    def catching(*args: Any, **kwargs: Any) -> Any:
        compiled = jit(*args, **kwargs)
        if kwargs.get("donate_argnums") != 0:
            return compiled

        def call(*specs: Any) -> Any:
            raise _Lowered(compiled.lower(*specs))

        return call

    jax.jit = catching
    try:
        (function._loop if program.steps > 1 else function._step)(tuple(state), batch)
    except _Lowered as caught:
        return caught.args[0], sum(map(len, state))
    finally:
        jax.jit = jit
    raise AssertionError("Expected one program that donates its state. Received: none.")


def _state(model: Any, layout: Layout) -> list[list[tuple[Any, Any]]]:
    groups = (
        model.trainable_variables,
        model.non_trainable_variables,
        keras_compat.referenced_variables(model.optimizer, model.trainable_variables),
        model.metrics_variables,
    )
    values = model._get_jax_state(
        trainable_variables=True,
        non_trainable_variables=True,
        optimizer_variables=True,
        metrics_variables=True,
    )
    return [
        list(zip(group, layout.of_variables(list(owners)), strict=True))
        for group, owners in zip(values, groups, strict=True)
    ]


def facts(name: str, devices: list[Any]) -> dict[str, Any]:
    """What XLA has made of one program."""
    before = time.process_time()
    program, arrays = lowered(PROGRAMS[name], devices)
    compiled = program.compile()
    text = compiled.as_text()
    found = re.findall(rf" ({COLLECTIVES})(?:-start)?\(", text)
    return {
        "name": name,
        "devices": f"{len(devices)} x {devices[0].device_kind}",
        "arrays": arrays,
        "donated": len(re.findall("may-alias|must-alias", text.partition("\n")[0])),
        "collectives": dict(collections.Counter(found)),
        "cpu_seconds": round(time.process_time() - before, 1),
    }


def main() -> None:
    platform, *names = sys.argv[1:]
    devices = topology(platform)
    for name in names or PROGRAMS:
        print(json.dumps(facts(name, devices)), flush=True)


if __name__ == "__main__":
    main()
