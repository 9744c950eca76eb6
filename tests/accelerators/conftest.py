"""A machine with the GPUs that a test says. In this process Keras runs on NumPy."""

import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest

os.environ["KERAS_BACKEND"] = "numpy"

GPU_SMOKE = Path(__file__).parents[2] / "benchmarks" / "gpu_smoke.py"
FAKE_NVML = Path(__file__).parent / "fake_nvml"


@pytest.fixture
def machine_with(monkeypatch):
    """Returns a function that gives this process a fake NVML with these GPUs."""
    monkeypatch.syspath_prepend(str(FAKE_NVML))
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)

    def give(gpus):
        if gpus is None:
            monkeypatch.delenv("FAKE_NVML", raising=False)
        else:
            text = gpus if isinstance(gpus, str) else json.dumps(gpus)
            monkeypatch.setenv("FAKE_NVML", text)

    yield give
    sys.modules.pop("pynvml", None)


@pytest.fixture(scope="module")
def gpu_smoke():
    path, modules = sys.path[:], set(sys.modules)
    spec = importlib.util.spec_from_file_location("gpu_smoke", GPU_SMOKE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if name.partition(".")[0] in ("smoke", "alternating", "networks"):
            del sys.modules[name]
