"""The memory that state takes on a device and in a process, for each `sharding`.

    KERAS_BACKEND=torch python benchmarks/memory.py [--units 512] [--layers 4] [--replicas 1 2 4]

The script runs on the backend that `KERAS_BACKEND` names, or on JAX if this variable is not set. On
PyTorch, and on JAX with `--workers`, each replica is a worker. All columns except "replicas" and
"ratio" are in bytes. "parameters" and "optimizer" are the measured sizes of the arrays that the
first device holds after a step of `fit`. The column "formula" to the right of each of them is the
size according to the ZeRO paper.

"process" is the largest growth of the memory of a process while the model is made and trained, as
the operating system reports it. If there are several workers, the column shows the worker with the
largest growth. The growth includes activations, code and memory that libraries keep, so it can be
compared with its formula only for large models (`--units 4096`). The formula adds the parameters,
the optimizer's variables and the gradients. With "optimizer" and "full" it also adds the whole
gradients of two layers and, on PyTorch, Gloo's copy of one of them; with "full" it also adds the
gathered weights of two layers. On PyTorch the update of a large weight needs three temporary values
as large as the weight; on one device plain Keras updates all weights at once. The formula counts
either these temporary values or those gradients and weights of two layers, whichever take more
memory. On JAX in
one process the formula is the sum over all devices. "temporary" is the memory that XLA reserves for
temporary values in the compiled step, on JAX in one process. "ratio" is the larger one of the
ratios of "parameters" and "optimizer" to their formulas.
The exit code is 1 if parameters or optimizer take more than 1.1 times the formula.
"""

import argparse
import os
import resource
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "jax")

import keras
import numpy as np

import kerasdist as kd
from kerasdist.backends.base.model_trainer import require_trainer

LIMIT = 1.1
ROW = "{:10} {:>8}" + 7 * " {:>13}" + " {:>7}"


def trained(strategy, units, layers):
    """The trained model, and a batch."""
    with strategy.scope():
        hidden = [keras.layers.Dense(units, activation="relu") for _ in range(layers)]
        model = keras.Sequential([keras.Input((units,)), *hidden])
        model.compile(keras.optimizers.Adam(), "mse")
    x = np.random.default_rng(0).normal(size=(32, units)).astype("float32")
    model.fit(x, x, batch_size=16, verbose=0)  # type: ignore[arg-type]
    return model, x[:16]


def held(variables):
    """The bytes on the first device that holds a part of each."""
    if keras.backend.backend() == "torch":
        return sum(one._value.nbytes for one in variables)
    return sum(one._value.addressable_data(0).nbytes for one in variables)


def temporary(model, batch):
    """What XLA has allotted on a device, beside the state, in the compiled step."""
    from kerasdist.backends.jax.fit.steps import StepFunction

    names = ("trainable", "non_trainable", "optimizer", "metrics")
    state = model._get_jax_state(**{f"{name}_variables": True for name in names})
    step = StepFunction(model, model.train_step, require_trainer(model).replicas.arrays)
    data = (batch, batch, None)
    compiled = step.compiled.program(state, data).lower(state, data).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def of_strategy(strategy, units, layers, folder):
    """How many weights a model has; the bytes of its weights, its optimizer, temporary values.

    Leaves in the folder by how much this process has grown at most.
    """
    before = resident()
    Path("/proc/self/clear_refs").write_text("5")  # the most that it had begins anew
    model, batch = trained(strategy, units, layers)
    Path(folder, str(os.getpid())).write_text(str(most_resident() - before))
    found = held(model.weights), held(model.optimizer.variables)
    is_one_process = isinstance(strategy, kd.MirroredStrategy | kd.OneDeviceStrategy)
    is_on_xla = keras.backend.backend() == "jax" and is_one_process
    return model.count_params(), *found, temporary(model, batch) if is_on_xla else "unknown"


def of_workers(replicas, sharding, *model):
    """The same of the chief of so many workers."""

    def measured():
        devices = ["cpu:0"]
        if replicas == 1:
            return of_strategy(kd.OneDeviceStrategy(devices[0]), *model)
        return of_strategy(
            kd.MultiWorkerMirroredStrategy(devices=devices, sharding=sharding, check="off"), *model
        )

    return kd.launch(measured, workers=replicas)


def resident():
    """How much memory this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def most_resident():
    """How much memory this process has had at most."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def formula(elements, replicas, sharding):
    """Bytes of parameters and of Adam's two slots, of a model in float32 (ZeRO, section 5)."""
    weights = 4 * elements / (replicas if sharding == "full" else 1)
    return weights, 8 * elements / (replicas if sharding else 1)


def formula_of_process(elements, replicas, sharding, layers):
    """The same with gradients, and what a step holds whole or beside them."""
    is_on_torch = keras.backend.backend() == "torch"
    is_divided = sharding is not None and replicas > 1
    gradients = 4 * elements / (replicas if is_divided else 1)
    whole = (3 if is_on_torch else 2) + 2 * (sharding == "full") if is_divided else 0
    # Plain Keras, which one device has, updates all weights at once.
    update = 3 * gradients / (layers if replicas > 1 else 1) if is_on_torch else 0
    held = sum(formula(elements, replicas, sharding)) + gradients
    return held + max(whole * 4 * elements / layers, update)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--units", type=int, default=512, help="width of the Dense layers")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--sharding", nargs="+", default=["None", "optimizer", "full"])
    parser.add_argument("--workers", action="store_true", help="each replica is a process")
    arguments = parser.parse_args()
    on_workers = arguments.workers or keras.backend.backend() == "torch"
    if not on_workers:
        kd.config.set_logical_cpu_devices(max(arguments.replicas))
    columns = ("parameters", "formula", "optimizer", "formula", "process", "formula", "temporary")
    head = ROW.format("sharding", "replicas", *columns, "ratio")
    print(f"on {keras.backend.backend()}\n{head}")
    worst = 0.0
    for replicas in arguments.replicas:
        devices = [f"cpu:{index}" for index in range(replicas)]
        for sharding in (None if one == "None" else one for one in arguments.sharding):
            with tempfile.TemporaryDirectory() as folder:
                model = arguments.units, arguments.layers, folder
                try:
                    if on_workers:
                        measured = of_workers(replicas, sharding, *model)
                    else:
                        strategy = kd.MirroredStrategy(devices, sharding=sharding, check="off")
                        measured = of_strategy(strategy, *model)
                except kd.errors.UnsupportedError:
                    continue  # what the backend does not divide
                process = max(int(one.read_text()) for one in Path(folder).iterdir())
            elements, *found, temp = measured
            expected = formula(elements, replicas, sharding)
            ratio = max(one / other for one, other in zip(found, expected, strict=True))
            worst = max(worst, ratio)
            pairs = [n for pair in zip(found, expected, strict=True) for n in map(round, pair)]
            should = formula_of_process(elements, replicas, sharding, arguments.layers)
            should *= 1 if on_workers else replicas
            row = str(sharding), replicas, *pairs, process, round(should), temp, f"{ratio:.3f}"
            print(ROW.format(*row), flush=True)
    sys.exit(0 if worst <= LIMIT else f"more than {LIMIT} of the formula")


if __name__ == "__main__":
    main()
