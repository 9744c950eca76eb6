"""Batch normalization in replicas is Keras's; in a fresh process, as Keras fixes its backend."""

import json

import pytest

from tests.fresh import run_forked

SCRIPT = """
import itertools, json
import kerasdist as kd
import keras, numpy as np, torch
from torch.nn import functional
from kerasdist.backends.torch.fit import batch_norm

BatchNormalization = keras.layers.BatchNormalization
# A layer, the shape of an example, and whether torch's own function is to serve it.
CASES = {
    "rows": (lambda: BatchNormalization(), (5,), True),
    "series": (lambda: BatchNormalization(), (7, 5), True),
    "images": (lambda: BatchNormalization(), (4, 3, 5), True),
    "volumes": (lambda: BatchNormalization(), (2, 3, 4, 5), True),
    "plain": (lambda: BatchNormalization(center=False, scale=False), (4, 3, 5), True),
    "renorm": (lambda: BatchNormalization(renorm=True), (4, 3, 5), True),
    "channels first": (lambda: BatchNormalization(axis=1), (5, 4, 3), False),
    "float16": (lambda: BatchNormalization(dtype="mixed_float16"), (4, 3, 5), True),
}
ROWS = 6
kinds = {"own": "per_replica", "synchronized": "synchronized", "inference": "per_replica"}
strategies = {
    mode: kd.MirroredStrategy(["cpu:0", "cpu:1"], batch_norm=kind) for mode, kind in kinds.items()
}
batch_norm.install()  # as the first strategy on GPUs does

of_cpus, called = functional.batch_norm, []

def recorded(*args, **options):
    called.append(options)
    return of_cpus(*args, **options)

def of_gpus(rows, mean, variance, scale, offset, *, eps):
    # The formula on GPUs; on CPUs torch multiplies the rows before it subtracts.
    return scale * (rows - mean) * (variance + eps).rsqrt() + offset

functional.batch_norm = recorded

def derivatives(layer, x, y, training):
    outputs = layer(x, training=training)
    weights = [variable.value for variable in layer.trainable_variables]
    loss = (y * outputs.float().sin()).mean()
    first = torch.autograd.grad(loss, [x, *weights], create_graph=True)
    penalty = first[0].square().sum()
    second = torch.autograd.grad(penalty, [x, *weights], allow_unused=True)
    again = (y * layer(x, training=training).float().sin()).mean()
    alone = torch.autograd.grad(again, [x, *weights])
    statistics = [variable.value for variable in layer.non_trainable_variables[:2]]
    return [one for one in (outputs, *first, *second, *alone, *statistics) if one is not None]

def made(make, shape):
    layer = make()
    layer.build((None, *shape))
    for index, weight in enumerate(layer.trainable_variables):
        weight.assign(np.linspace(1 + index, 2, 5))
    return layer

told = []
for device, name, mode in itertools.product(("cpu", "gpu"), CASES, strategies):
    batch_norm._DEVICE = "cpu" if device == "gpu" else "cuda"
    (make, shape, serves), strategy = CASES[name], strategies[mode]
    torch.manual_seed(1)
    x = (torch.randn(ROWS, *shape) * 3 + 1).requires_grad_()
    y = torch.randn(ROWS, *shape)
    plain = made(make, shape)
    training = mode != "inference"
    with strategy.scope():
        layer = made(make, shape)
    # With all rows on each replica the global moments are a replica's own.
    expected = derivatives(plain, x, y, training)
    called.clear()
    found = strategy.run(lambda: derivatives(layer, x, y, training))
    replicas = [*zip(*map(strategy.local_results, found), strict=True)]
    pairs = [pair for own in replicas for pair in zip(expected, own, strict=True)]
    difference = max(((a - b).abs().max() / (1 + a.abs().max())).item() for a, b in pairs)
    types = all(a.dtype == b.dtype and a.shape == b.shape for a, b in pairs)
    is_served = serves and device == "gpu"
    told.append([f"{name}, {mode}, {device}", difference, types, bool(called) == is_served])

# Rows whose mean is 10,000 times their deviation.
functional.batch_norm, lost = of_gpus, []
for batch_norm._DEVICE in ("cuda", "cpu"):
    far = (torch.randn(64, 5) + 1e4).requires_grad_()
    mean, variance = batch_norm.Moments.apply(far, None, "")
    [fused] = torch.autograd.grad(mean.sum() + (0.3 * variance).sum(), far)
    exact = (1 + 0.6 * (far.double() - mean)) / len(far)
    lost.append(((fused - exact).abs().max() / exact.abs().max()).item())
print(json.dumps([told, lost]))
"""


@pytest.fixture(scope="module")
def told():
    return json.loads(run_forked(SCRIPT, "torch").splitlines()[-1])


def test_values_and_gradients_are_those_of_plain_keras(told):
    """First and second derivatives; Keras's variance loses digits, float16 has three of them."""
    cases, _ = told
    assert len(cases) == 8 * 3 * 2
    for name, difference, types, _ in cases:
        assert types, name
        assert difference < (2e-3 if "float16" in name else 2e-5), name


def test_torchs_own_function_serves_what_it_can_on_gpus(told):
    cases, _ = told
    assert [name for name, *_, as_expected in cases if not as_expected] == []


def test_a_gradient_loses_no_digits_where_the_mean_is_large(told):
    _, lost = told
    assert max(lost) < 1e-6
