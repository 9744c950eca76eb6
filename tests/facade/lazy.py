"""Modules imported at first use: case modules are read in processes without any framework."""

from typing import Any

from tests.conformance.lazy import LazyModule, kd, keras

ops: Any = LazyModule("keras.ops")

__all__ = ["LazyModule", "kd", "keras", "ops"]
