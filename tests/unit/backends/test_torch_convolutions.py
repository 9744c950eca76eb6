"""Convolutions in replicas are Keras's own: in a fresh process, as Keras fixes its backend."""

import json

import pytest

from tests.fresh import run_fresh

SCRIPT = """
import json
import kerasdist as kd
import keras, numpy as np, torch

layers = keras.layers
# A layer, and the shape of an example.
CASES = {
    "same": (lambda: layers.Conv2D(4, 3, padding="same"), (9, 8, 3)),
    "valid": (lambda: layers.Conv2D(4, (3, 2)), (9, 8, 3)),
    "strides": (lambda: layers.Conv2D(4, 3, strides=2, padding="same"), (9, 8, 3)),
    "dilation": (lambda: layers.Conv2D(4, 3, dilation_rate=2), (9, 8, 3)),
    "groups": (lambda: layers.Conv2D(4, 3, groups=2), (9, 8, 6)),
    "volumes": (lambda: layers.Conv3D(4, 2, strides=2, padding="same"), (5, 4, 3, 2)),
    "channels first": (lambda: layers.Conv2D(4, 3, data_format="channels_first"), (3, 9, 8)),
    "rows": (lambda: layers.Conv1D(4, 3, padding="same"), (9, 2)),
}
strategy = kd.MirroredStrategy(["cpu:0", "cpu:1"])
contiguous, copies = torch.Tensor.contiguous, []

def copied(tensor, *args, **kwargs):
    copy = contiguous(tensor, *args, **kwargs)
    if copy.data_ptr() != tensor.data_ptr() and tensor.shape[0] == 2:  # the batch, not a kernel
        copies.append(tuple(tensor.shape))
    return copy

torch.Tensor.contiguous = copied
told = {}
for name, (make, shape) in CASES.items():
    with strategy.scope():
        layer = make()
        layer.build((None, *shape))
    x = torch.randn(2, *shape, requires_grad=True)

    def derivatives():
        outputs = layer(x)
        weights = [variable.value for variable in layer.trainable_variables]
        return outputs, *torch.autograd.grad(outputs.square().sum(), [x, *weights])

    plain = derivatives()
    copies.clear()
    ours = [strategy.local_results(one)[0] for one in strategy.run(derivatives)]
    told[name] = {
        "copies": len(copies),
        "differences": [(a - b).abs().max().item() for a, b in zip(plain, ours, strict=True)],
        "shapes": [a.shape == b.shape for a, b in zip(plain, ours, strict=True)],
    }
print(json.dumps(told))
"""

NAMES = ["same", "valid", "strides", "dilation", "groups", "volumes", "channels first", "rows"]


@pytest.fixture(scope="module")
def told():
    return json.loads(run_fresh(SCRIPT, KERAS_BACKEND="torch").splitlines()[-1])


@pytest.mark.parametrize("name", NAMES)
def test_values_and_gradients_are_those_of_plain_keras(told, name):
    assert all(told[name]["shapes"])
    assert max(told[name]["differences"]) < 1e-4


@pytest.mark.parametrize("name", [name for name in NAMES if name != "rows"])
def test_no_batch_is_copied_before(told, name):
    assert told[name]["copies"] == 0
