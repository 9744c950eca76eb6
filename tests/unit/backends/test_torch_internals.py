"""What is private in torch stands in one module; without it a feature is slower, or is refused."""

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
# Keras's trainer, which this one derives from, calls its methods by private names.
OF_KERAS = {HOME / "fit" / "trainer.py"}
PLACES = {HOME / "private.py", HOME / "internals.py"}
FILES = sorted({*HOME.rglob("*.py")} - PLACES)
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
def test_what_is_private_stands_in_one_module(path: Path):
    found = [*private_parts(parse(path))]
    assert not [one for one in found if path not in OF_KERAS or "torch" in one]
    assert {*classes_of_torch(parse(path))} <= {"torch.autograd.Function"}


def test_that_module_uses_what_is_declared_and_nothing_else():
    source = (HOME / "private.py").read_text(encoding="utf-8")
    used = set(re.findall(r"\binternals\.([A-Z_]+)", source))
    assert used == set(internals_of(internals))
    assert [*private_parts(parse(HOME / "private.py"))] == ["tensor._version"]


PRESENT = """
import json
from kerasdist.backends.torch import internals
from kerasdist.core.internals import internals_of
print(json.dumps([name for name, one in internals_of(internals).items() if not one.is_there()]))
"""


def test_the_installed_torch_has_all():
    assert json.loads(run_forked(PRESENT, "torch").splitlines()[-1]) == []


# Torch as it would be without them: `kerasdist` is imported after that.
GONE = """
import keras, numpy as np, torch
mul, add, copy = torch._foreach_mul, torch._foreach_add_, torch._foreach_copy_
del torch._foreach_mul, torch._foreach_add_, torch._foreach_copy_
del torch.nn.modules.batchnorm._BatchNorm, torch._C._are_functorch_transforms_active
vars(torch.autograd.graph).pop("queue_callback", None)
del torch.autograd.Variable._execution_engine

class Unversioned(torch.Tensor):
    @property
    def _version(self):
        raise AttributeError

import kerasdist as kd
from kerasdist.backends.torch import private

def refused(call, said):
    try:
        call()
    except kd.errors.VersionError as error:
        assert said in str(error) and torch.__version__ in str(error), error
    else:
        raise AssertionError(said)

def tensors(seed):
    numbers = torch.Generator().manual_seed(seed)
    kinds = (torch.float32, torch.float64, torch.float16)
    return [torch.randn(3, 2, generator=numbers).to(kind) for kind in kinds]

def equal(ones, others):
    pairs = zip(ones, others, strict=True)
    return all(one.dtype == other.dtype and torch.equal(one, other) for one, other in pairs)

assert equal(private.multiply_each(tensors(0), 1 / 3), mul(tensors(0), 1 / 3))
for by_one, at_once in ((private.add_to_each, add), (private.copy_to_each, copy)):
    ones, others = tensors(0), tensors(0)
    by_one(ones, tensors(1))
    at_once(others, tensors(1))
    assert equal(ones, others) and not equal(ones, tensors(0))

public = private.batch_norm_classes()
for kind in (torch.nn.BatchNorm2d, torch.nn.LazyBatchNorm1d, torch.nn.SyncBatchNorm):
    assert issubclass(kind, public), kind
assert not issubclass(torch.nn.GroupNorm, public)
assert not private.can_fuse_batch_norm()
one = torch.zeros(2)
before = private.count_changes(one)
one.add_(1)
assert private.count_changes(one) > before
refused(lambda: private.count_changes(one.as_subclass(Unversioned)), "torch:Tensor._version")
refused(lambda: private.call_after_backward(print), "torch.autograd.graph:queue_callback")
print("done")
"""


def test_without_them_a_feature_is_slower_or_refused():
    assert run_forked(GONE, "torch").splitlines()[-1] == "done"


# In models: the compiler's error, and the mode by which a trial draws.
GONE_IN_FIT = """
import warnings
import keras, numpy as np, torch
import torch._dynamo.exc, torch.utils._python_dispatch
del torch._dynamo.exc.TorchDynamoException, torch.utils._python_dispatch.TorchDispatchMode
import kerasdist as kd
from kerasdist.backends.torch import private

assert private.compiler_errors() == ()

class Centred(keras.layers.Layer):
    def call(self, x):
        return x - keras.ops.mean(x, axis=0)

def model(*layers):
    made = keras.Sequential([keras.Input((3,)), *layers, keras.layers.Dense(1)])
    made.compile("sgd", "mse")
    return made

x = np.random.default_rng(0).normal(size=(8, 3)).astype("float32")
with kd.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
    keras.utils.set_random_seed(0)
    mixing, plain = model(Centred()), model(keras.layers.Dense(4))
with warnings.catch_warnings():
    warnings.simplefilter("error")
    mixing.fit(x, x[:, :1], batch_size=8, verbose=0)  # it is not compared
    plain.fit(x, x[:, :1], batch_size=8, verbose=0)
try:
    kd.compare_with_one_device(mixing, x, x[:, :1])
except kd.errors.VersionError as error:
    assert "TorchDispatchMode" in str(error), error
else:
    raise AssertionError("compared")
print("done")
"""


def test_without_the_dispatch_mode_a_model_trains_uncompared():
    assert run_forked(GONE_IN_FIT, "torch").splitlines()[-1] == "done"
