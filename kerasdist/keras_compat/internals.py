"""What kerasdist holds on to in Keras that is not public: each internal once, by what needs it."""

from __future__ import annotations

from kerasdist.core.internals import EVERY_VERSION, Internal

FLATTEN_LAYERS = Internal(
    {"keras:Layer._flatten_layers": EVERY_VERSION},
    feature="training a model",
    without="refused",
    in_each_fit=True,
)

USES_TORCH_COMPILE = Internal(
    {"keras:Model._use_torch_compile": "3.16", "keras:Model._should_torch_compile": "3.12 to 3.15"},
    feature="jit_compile=True on PyTorch",
    without="the model runs uncompiled, with a warning",
    backends=("torch",),
)
