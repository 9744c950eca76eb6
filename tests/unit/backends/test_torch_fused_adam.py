"""Adam by torch's kernel is Keras's Adam: in a fresh process, as Keras fixes its backend.

What the replicas of a strategy apply is compared with what plain Keras does to equal variables.
"""

import json

import pytest

from tests.fresh import run_fresh

SCRIPT = """
import json
import kerasdist as kd
import keras, numpy as np, torch

adam, adamw = keras.optimizers.Adam, keras.optimizers.AdamW
kernel, calls = torch._fused_adam_, []

def counted(*args, **kwargs):
    calls.append(len(args[0]))
    return kernel(*args, **kwargs)

torch._fused_adam_ = counted

class Own(adam):
    def update_step(self, gradient, variable, learning_rate):
        super().update_step(2 * gradient, variable, learning_rate)

class NonNegative(keras.constraints.Constraint):
    def __call__(self, w):
        return keras.ops.maximum(w, 0.0)

def excluding():
    optimizer = adamw(0.02, weight_decay=0.1)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    return optimizer

schedule = keras.optimizers.schedules.ExponentialDecay(0.05, 2, 0.7)
scaling = keras.optimizers.LossScaleOptimizer
# How to make the optimizer; what else the variables are made with.
CASES = {
    "adam": (lambda: adam(0.02), {}),
    "large epsilon": (lambda: adam(0.02, epsilon=0.5, beta_1=0.5, beta_2=0.7), {}),
    "amsgrad": (lambda: adam(0.02, amsgrad=True), {}),
    "adamw": (excluding, {}),
    "schedule": (lambda: adam(schedule), {}),
    "callable rate": (lambda: adam(lambda: 0.03), {}),
    "clipnorm": (lambda: adam(0.02, clipnorm=0.3), {}),
    "global_clipnorm": (lambda: adam(0.02, global_clipnorm=0.3), {}),
    "averages": (lambda: adam(0.02, use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=2), {}),
    "accumulation": (lambda: adam(0.02, gradient_accumulation_steps=2), {}),
    "loss scale": (lambda: scaling(adam(0.02), initial_scale=4.0), {}),
    "constraint": (lambda: adam(0.02), {"constraint": NonNegative()}),
    # What Keras does itself:
    "a user-defined class": (lambda: Own(0.02), {}),
    "integer for a number": (lambda: adam(0.02, epsilon=1), {}),
    "float64": (lambda: adam(0.02), {"dtype": "float64"}),
    "bfloat16": (lambda: adam(0.02), {"dtype": "bfloat16"}),
    "another rule": (lambda: keras.optimizers.Nadam(0.02), {}),
}
SHAPES = {"kernel": (5, 3), "bias": (3,), "scale": (), "none": (0, 2)}
STEPS = 6
rng = np.random.default_rng(0)

def made(make, options):
    rng = np.random.default_rng(1)
    variables = [
        keras.Variable(rng.normal(size=shape), name=name, **{"dtype": "float32", **options})
        for name, shape in SHAPES.items()
    ]
    optimizer = make()
    optimizer.build(variables)
    return optimizer, variables

def gradients_of(step, variables):
    rng = np.random.default_rng(step)
    # Of very different sizes; and the first one's memory is in another order.
    gradients = [
        torch.tensor(rng.normal(size=v.shape) * 10.0 ** (i - 2)).to(v.value.dtype)
        for i, v in enumerate(variables)
    ]
    first = gradients[0].T.contiguous().T
    assert not first.is_contiguous()
    return [first, *gradients[1:]]

strategy = kd.MirroredStrategy(["cpu:0", "cpu:1"])
told = {}
for name, (make, options) in CASES.items():
    calls.clear()
    plain, plains = made(make, options)
    with torch.no_grad():
        for step in range(STEPS):
            plain.apply(gradients_of(step, plains), plains)
    assert not calls, "Keras outside of a strategy is plain Keras"
    with strategy.scope():
        ours, variables = made(make, options)

    def apply(step):
        ours.apply([0.5 * g for g in gradients_of(step, variables)], variables)

    versions = [v.value._version for v in variables]
    for step in range(STEPS):
        strategy.run(apply, (step,))
    tolerance = 1e-2 if options.get("dtype") == "bfloat16" else 3e-6
    pairs = zip([*variables, *ours.variables], [*plains, *plain.variables], strict=True)
    arrays = [[one.path, *(np.asarray(v.value.detach().double()) for v in (one, other))]
              for one, other in pairs]
    differences = [
        f"{path}: {np.max(np.abs(a - b))}"
        for path, a, b in arrays
        if not np.allclose(a, b, rtol=tolerance, atol=tolerance * 0.1)
    ]
    told[name] = {
        "kernel": len(calls),
        "differences": differences,
        "noticed": all(v.value._version > before for v, before in zip(variables, versions)),
    }

with strategy.scope():
    part, (first, *_) = made(lambda: adam(0.02), {})
calls.clear()
strategy.run(lambda: part.apply([torch.ones(5, 3)], [first]))
told["of some variables"] = calls[:]
print(json.dumps(told))
"""

SERVED = [
    "adam",
    "large epsilon",
    "amsgrad",
    "adamw",
    "schedule",
    "callable rate",
    "clipnorm",
    "global_clipnorm",
    "averages",
    "accumulation",
    "loss scale",
    "constraint",
]
LEFT = ["a user-defined class", "integer for a number", "float64", "bfloat16", "another rule"]
CALLS = {"accumulation": 3}


@pytest.fixture(scope="module")
def told():
    return json.loads(run_fresh(SCRIPT, KERAS_BACKEND="torch").splitlines()[-1])


@pytest.mark.parametrize("name", [*SERVED, *LEFT])
def test_numbers_are_those_of_plain_keras(told, name):
    assert told[name]["differences"] == []


@pytest.mark.parametrize("name", SERVED)
def test_the_kernel_serves_the_rule_of_kerass_own_classes(told, name):
    assert told[name]["kernel"] == CALLS.get(name, 6)


@pytest.mark.parametrize("name", LEFT)
def test_anything_else_is_left_to_keras(told, name):
    assert told[name]["kernel"] == 0


@pytest.mark.parametrize("name", SERVED)
def test_autograd_sees_that_values_have_changed(told, name):
    assert told[name]["noticed"]


def test_some_of_the_variables_can_be_updated(told):
    assert told["of some variables"] == [1]
