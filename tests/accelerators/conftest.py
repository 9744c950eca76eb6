"""A machine with the GPUs that a test says. In this process Keras runs on NumPy."""

import json
import os
import sys
from pathlib import Path

import pytest

os.environ["KERAS_BACKEND"] = "numpy"

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
