"""Compiles `fit` for a platform that is not there, and prints one JSON line per program.

    python -m tests.ahead_of_time.programs v5e:2x2 name ...

XLA compiles for a topology that is described as for `kerasdist plan --devices`: of TPUs with
``libtpu``, of GPUs with the plug-in for CUDA. The program is the one that `fit` runs, and that
`kerasdist plan` compiles.
"""

import collections
import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import keras
import numpy as np

import kerasdist as kd
from kerasdist.backends.jax import ahead_of_time
from kerasdist.backends.jax.ahead_of_time import TrainingProgram
from kerasdist.backends.jax.backend import coordinates_of
from kerasdist.backends.jax.mesh import gathers, host_memory
from kerasdist.backends.jax.mesh.layout import Layout
from kerasdist.cli.plan import hlo
from kerasdist.core.hardware import parse_target
from kerasdist.core.partitions import DeviceAssignment, Topology
from kerasdist.core.sharding import GROUP_BYTES

L = keras.layers
CLASSES = 8


def mlp() -> keras.Model:
    hidden = [L.Dense(256, "relu"), L.Dropout(0.1), L.Dense(256, "relu")]
    return keras.Sequential([keras.Input((128,)), *hidden, L.Dense(CLASSES)])


DEEP, UNITS = 12, 1024


def deep() -> keras.Model:
    hidden = [L.Dense(UNITS, "gelu", use_bias=False) for _ in range(DEEP)]
    return keras.Sequential([keras.Input((UNITS,)), *hidden, L.Dense(CLASSES)])


def wide() -> keras.Model:
    """Its larger variables can be divided by 4,096."""
    return keras.Sequential([keras.Input((128,)), L.Dense(4096, "relu"), L.Dense(CLASSES)])


def normalized() -> keras.Model:
    hidden = [L.Dense(4096, use_bias=False), L.BatchNormalization(), L.ReLU()]
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
    build: Callable[[], keras.Model] = mlp
    batch: int = 64
    clipnorm: float | None = None
    policy: str = "float32"
    logical_devices: int = 1
    splits: dict[str, tuple[int, int]] = field(default_factory=dict)
    sharding: kd.Sharding | None = None
    offload: bool = False
    group_bytes: int = GROUP_BYTES


PROGRAMS = {
    "mlp": Program(),
    "mlp, uneven batch": Program(batch=62),
    "mlp, clipnorm": Program(clipnorm=1.0),
    "mlp, 2 logical devices": Program(logical_devices=2, splits={r"dense.*/kernel": (1, 2)}),
    "mlp, optimizer sharded": Program(sharding=kd.Sharding("optimizer", min_size=1024)),
    "mlp, all sharded": Program(sharding=kd.Sharding("full", min_size=1024)),
    "deep, all sharded": Program(deep, sharding=kd.Sharding("full"), group_bytes=1),
    "deep": Program(deep),
    "deep, offloaded": Program(deep, offload=True, group_bytes=1),
    "convolutions with BatchNormalization": Program(convolutions),
    "transformer in bfloat16": Program(transformer, batch=32, policy="mixed_bfloat16"),
    "LSTM": Program(recurrent, batch=32),
}

# Of the files in golden/: by name, with a batch that grows with the devices.
EXAMPLES_EACH = 8
SHARDED = {state: kd.Sharding(state, min_size=4096) for state in ("optimizer", "full")}
SCALED = {
    f"{build.__name__}-{name}": Program(build, sharding=sharding)
    for build in (wide, normalized)
    for name, sharding in {"replicated": None, **SHARDED}.items()
}


def program_of(program: Program, devices: list[Any]) -> TrainingProgram:
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
    layout = Layout(devices, program.logical_devices, program.sharding, offload=program.offload)
    layout.splits.add(program.splits)
    gathers.GROUP_BYTES = host_memory.GROUP_BYTES = program.group_bytes
    batch = tuple(jax.ShapeDtypeStruct(one.shape, one.dtype) for one in (x, y))
    return ahead_of_time.training_program(model, batch, layout)


def facts(name: str, devices: list[Any]) -> dict[str, Any]:
    known = {key: replace(one, batch=EXAMPLES_EACH * len(devices)) for key, one in SCALED.items()}
    program = program_of({**PROGRAMS, **known}[name], devices)
    executable = program.lowered.compile()
    text, memory = executable.as_text(), executable.memory_analysis()
    found = hlo.collectives(text)
    return {
        "name": name,
        "arrays": len(jax.tree.leaves(program.lowered.args_info[0][0])),
        "donated": len(re.findall("may-alias|must-alias", text.partition("\n")[0])),
        "collectives": dict(collections.Counter(each.kind for each in found)),
        "sent": [[each.kind, each.bytes, each.devices] for each in found],
        "held": dict(program.state_bytes),
        "on the host": [program.host_bytes, memory.host_argument_size_in_bytes],
        "temporary": memory.temp_size_in_bytes,
    }


def main() -> None:
    target, *names = sys.argv[1:]
    devices = ahead_of_time.described_devices(parse_target(target))
    if devices[0].platform == "tpu":
        places = coordinates_of(devices)
        topology = Topology(None, np.max(places, axis=(0, 1)) + 1, places)
        blocks = DeviceAssignment.build(topology, [1, 1, 1, 2], num_replicas=2)
        found = {"topology": str(topology), "blocks": blocks.core_assignment.tolist()}
        print(json.dumps({"name": "topology", **found}))
    for name in names:
        print(json.dumps(facts(name, devices)), flush=True)


if __name__ == "__main__":
    main()
