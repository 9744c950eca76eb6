"""What is private in torch is declared; without it a feature is slower, or is refused."""

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from kerasdist.backends.torch import internals
from kerasdist.core.internals import internals_of
from tests.fresh import run_forked
from tests.unit.test_layers import PACKAGE, parse

HOME = PACKAGE / "backends" / "torch"
FILES = sorted({*HOME.rglob("*.py")} - {HOME / "internals.py"})
BY_NAME = {"getattr", "setattr", "hasattr", "delattr", "attrgetter", "methodcaller"}
OWN = {"self", "cls", "super()"}


def is_private(name: object) -> bool:
    return isinstance(name, str) and re.match(r"_(?!_)", name) is not None


def private_parts(tree: ast.AST) -> Iterator[str]:
    """The private names below `tree` of other objects than the one whose class is being written."""
    own = OWN | {
        target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and ast.unparse(node.value) == "copy.copy(self)"
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=value, attr=name) if is_private(name):
                if ast.unparse(value) not in own:
                    yield ast.unparse(node)
            case ast.Import(names=names):
                yield from (one.name for one in names if "._" in one.name)
            case ast.ImportFrom(module=str(module), names=names):
                paths = [f"{module}.{one.name}" for one in names]
                yield from (one for one in paths if "._" in one.replace(".__future__", ""))
            case ast.Call(func=func, args=[*_, ast.Constant(value=name)]) if is_private(name):
                if ast.unparse(func).rpartition(".")[2] in BY_NAME:
                    yield ast.unparse(node)
            case ast.Constant(value=str(text)) if re.search(r"\btorch(\.\w+)*[.:]_", text):
                yield text


def classes_of_torch(tree: ast.AST) -> Iterator[str]:
    """The classes of torch that classes below `tree` derive from, of which `self` then is one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield from (base for base in map(ast.unparse, node.bases) if base.startswith("torch."))


@pytest.mark.parametrize(
    "code",
    [
        "torch._C._are_functorch_transforms_active()",
        "tensor._version",
        "self.source._version",
        "from torch._dynamo.exc import TorchDynamoException",
        "from torch.nn.modules.batchnorm import _BatchNorm",
        "import torch._dynamo",
        "getattr(tensor, '_version')",
        "operator.attrgetter('_version')",
        "importlib.import_module('torch._dynamo.exc')",
    ],
)
def test_a_private_part_is_found(code):
    assert [*private_parts(ast.parse(code))]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(HOME)))
def test_what_is_private_is_declared(path: Path):
    tree = parse(path)
    assert not [*private_parts(tree)]
    assert {*classes_of_torch(tree)} <= {"torch.autograd.Function", "torch.Tensor"}
    kinds = [one for one in ast.walk(tree) if isinstance(one, ast.ClassDef)]
    tensors = [one for one in kinds if "torch.Tensor" in classes_of_torch(one)]
    assert not re.search(r"\bself\._[a-z]", "".join(map(ast.unparse, tensors)))


def test_what_is_declared_is_used():
    source = "".join(path.read_text(encoding="utf-8") for path in FILES)
    assert {*internals_of(internals)} <= {*re.findall(r"\binternals\.([A-Z_]+)", source)}


PRESENT = """
import json
from kerasdist.backends.torch import internals
from kerasdist.core.internals import internals_of
print(json.dumps([name for name, one in internals_of(internals).items() if not one.is_there()]))
"""


def test_the_installed_torch_has_all():
    assert json.loads(run_forked(PRESENT, "torch").splitlines()[-1]) == []


# Kerasdist with a torch that has none of them.
GONE = """
import dataclasses, warnings
import keras, numpy as np, torch
import kerasdist as kd
from kerasdist.backends.torch import internals
from kerasdist.core.internals import internals_of

for name, one in internals_of(internals).items():
    spellings = {f"{path}_moved": versions for path, versions in one.spellings.items()}
    setattr(internals, name, dataclasses.replace(one, spellings=spellings))

def refused(internal, use):
    try:
        use()
    except kd.errors.VersionError as error:
        assert next(iter(internal.spellings)) in str(error), error
    else:
        raise AssertionError(internal)

def tensors(seed):
    numbers = torch.Generator().manual_seed(seed)
    kinds = (torch.float32, torch.float64, torch.float16)
    return [torch.randn(3, 2, generator=numbers).to(kind) for kind in kinds]

def equal(ones, others):
    pairs = zip(ones, others, strict=True)
    return all(one.dtype == other.dtype and torch.equal(one, other) for one, other in pairs)

# One by one, in place of kernels for all.
multiply = internals.MULTIPLY_EACH.value
add, copy = internals.ADD_TO_EACH.value, internals.COPY_TO_EACH.value
assert equal(multiply(tensors(0), 1 / 3), torch._foreach_mul(tensors(0), 1 / 3))
for by_one, at_once in ((add, torch._foreach_add_), (copy, torch._foreach_copy_)):
    assert by_one is not at_once
    ones, others = tensors(0), tensors(0)
    by_one(ones, tensors(1))
    at_once(others, tensors(1))
    assert equal(ones, others) and not equal(ones, tensors(0))

assert internals.ARE_TRANSFORMS_ACTIVE.value()
assert internals.COMPILER_ERROR.value == ()

class Centred(keras.layers.Layer):
    def call(self, x):
        return x - keras.ops.mean(x, axis=0)

class Buffered(keras.layers.Layer):
    def __init__(self):
        super().__init__()
        self.register_buffer("ones", torch.ones(()))

    def call(self, x):
        return x * self.ones

def made(*layers, **options):
    model = keras.Sequential([keras.Input((3,)), *layers, keras.layers.Dense(1)])
    model.layers[-1].set_weights([np.linspace(-1, 1, 3).reshape(3, 1), np.array([0.5])])
    model.compile(**{"optimizer": "sgd", "loss": "mse", **options})
    return model

x = np.random.default_rng(0).normal(size=(15, 3)).astype("float32")

def fit(model):
    model.fit(x, x[:, :1], batch_size=8, epochs=2, shuffle=False, verbose=0)
    return np.concatenate([np.ravel(one) for one in model.get_weights()])

strategy = kd.MirroredStrategy(["cpu:0", "cpu:1"])
with strategy.scope():
    normalized = made(keras.layers.BatchNormalization())
    dense, mixing, buffered = made(), made(Centred()), made(Buffered())
    scale = made(optimizer=keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)))
    mean = keras.metrics.Mean()
one_device = fit(made(keras.layers.BatchNormalization()))
np.testing.assert_allclose(fit(normalized), one_device, rtol=1e-5)
with warnings.catch_warnings():
    warnings.simplefilter("error", UserWarning)
    warnings.filterwarnings("ignore", "The first step is not compared")
    fit(mixing)
refused(internals.DISPATCH_MODE, lambda: kd.compare_with_one_device(mixing, x, x[:, :1]))
refused(internals.CALL_AFTER_BACKWARD, lambda: fit(scale))
refused(internals.COUNT_OF_CHANGES, lambda: fit(buffered))
refused(internals.COUNT_OF_CHANGES, lambda: strategy.run(lambda: mean.update_state(1.0)))
kd.config.set_most_examples_at_once(2)
refused(internals.COUNT_OF_CHANGES, lambda: fit(dense))
print("done")
"""


def test_without_them_a_feature_is_slower_or_refused():
    assert run_forked(GONE, "torch").splitlines()[-1] == "done"
