"""A package in which something has another name works as before, and has it under no other."""

import pytest

from tests.fresh import run_fresh

# In small what Keras has: modules of a backend that are found one higher, imports with a star and
# under other names, local names and arguments that are called as a function is.
FILES = {
    "__init__.py": "from keras.src.layers import Layer\nfrom keras.src.checks import check",
    "src/__init__.py": "from keras.src import losses",
    "src/losses.py": """
import functools
from keras.src import backend
from keras.src.masks import apply_mask

SCALE = 2

def reduce(values, scale=None):
    scale = SCALE if scale is None else scale
    return scale * sum(apply_mask(values))

def twice(reduce):
    return reduce([1]) + given(reduce=reduce)

def given(reduce=None):
    return 0 if reduce is None else 1

def once():
    return functools.partial(reduce, [1])() + backend.nn.double(0)

def set_scale(value):
    global SCALE
    SCALE = value
""",
    "src/masks/__init__.py": "from keras.src.masks.apply import apply_mask",
    "src/masks/apply.py": "def apply_mask(values):\n    return values",
    "src/layers.py": """
from keras.src import losses as losses_module
from keras.src.losses import *
from keras.src.losses import reduce as reduce_values
import keras.src.losses

class Layer:
    def __init__(self):
        self._losses = [1]
        self.total = None

    def call(self):
        assert self.total is None
        found = [losses_module.reduce(self._losses), reduce(self._losses)]
        found += [reduce_values(getattr(self, "_losses")), keras.src.losses.reduce(self._losses)]
        return found
""",
    "src/scope_stack.py": "STATE = {}",
    "src/state.py": """
from keras.src.scope_stack import STATE

def scopes():
    return STATE.setdefault("scope_stack", [])
""",
    "src/checks.py": """
import keras.src.masks
from keras.src import backend, losses, state
from keras.src.layers import Layer

def check():
    assert state.scopes() is state.STATE["scope_stack"]
    assert Layer().call() == [2, 2, 2, 2]
    assert losses.twice(lambda values: 5) == 6
    assert losses.once() == 2
    losses.set_scale(3)
    assert losses.once() == 3
    assert backend.nn.double(2) == 4
""",
    "src/backend/__init__.py": "from keras.src.backend.torch import *",
    "src/backend/torch/__init__.py": "from keras.src.backend.torch import nn",
    "src/backend/torch/nn.py": "def double(x):\n    return 2 * x",
}

USE = """
import sys
sys.path[:0] = [FOLDER, ROOT]
from tests.versions import renaming
renaming.rename_in_keras([PATH])
import keras
keras.check()
from kerasdist.core.internals import Internal
here = Internal({PATH: "all"}, "tests", "refused").is_there()
again = Internal({MOVED: "all"}, "tests", "refused").is_there()
print(here, again)
"""


@pytest.mark.parametrize(
    ("path", "now"),
    [
        ("keras:Layer._losses", "keras:Layer._losses_moved"),
        ("keras.src.layers:Layer.total", "keras.src.layers:Layer.total_moved"),
        ("keras.src.layers:Layer.call", "keras.src.layers:Layer_moved.call"),
        ("keras.src.losses:reduce", "keras.src.losses:reduce_moved"),
        ("keras.src.losses:SCALE", "keras.src.losses:SCALE_moved"),
        ("keras.src.losses:apply_mask", "keras.src.losses:apply_mask_moved"),
        ("keras.src.masks:apply_mask", "keras.src.masks:apply_mask_moved"),
        ("keras.src.masks:apply.apply_mask", "keras.src.masks:apply.apply_mask_moved"),
        ("keras.src.masks:apply", "keras.src.masks:apply_moved"),
        ("keras.src:losses", "keras.src:losses_moved"),
        ("keras.src.backend:nn", "keras.src.backend:nn_moved"),
        ("keras.src.backend:nn.double", "keras.src.backend:nn.double_moved"),
        ("keras.src.state:scopes.scope_stack", "keras.src.state:scopes.scope_stack_moved"),
        ("keras.src.backend:nn.double.__call__", "keras.src.backend:nn.double_moved.__call__"),
        ("keras.src.losses:nothing", None),
    ],
)
def test_only_the_name_is_gone(path, now, tmp_path):
    for name, text in FILES.items():
        file = tmp_path / "keras" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, "utf-8")
    values = {"FOLDER": str(tmp_path), "PATH": path, "MOVED": now or path}
    head = "".join(f"{name} = {value!r}\n" for name, value in values.items())
    code = f"import os\nROOT = os.getcwd()\n{head}{USE}"
    if now is None:
        with pytest.raises(AssertionError, match="nothing"):
            run_fresh(code, KERAS_BACKEND="torch")
    else:
        assert run_fresh(code, KERAS_BACKEND="torch").split() == ["False", "True"]
