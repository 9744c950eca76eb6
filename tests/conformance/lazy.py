"""Modules imported at first use: case modules are read in processes without any framework."""

import importlib
from typing import Any


class LazyModule:
    def __init__(self, name: str):
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(importlib.import_module(self._name), attribute)


keras: Any = LazyModule("keras")
kd: Any = LazyModule("kerasdist")
tf: Any = LazyModule("tensorflow")
ops: Any = LazyModule("keras.ops")
torch: Any = LazyModule("torch")
jax: Any = LazyModule("jax")
jnp: Any = LazyModule("jax.numpy")
grain: Any = LazyModule("grain")
