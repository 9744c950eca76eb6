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
    """Returns a function that gives this process a fake NVML with these GPUs, and the variable."""
    monkeypatch.syspath_prepend(str(FAKE_NVML))
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    for name in ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)

    def give(gpus, visible=None):
        text = gpus if isinstance(gpus, str | None) else json.dumps(gpus)
        for name, value in {"FAKE_NVML": text, "CUDA_VISIBLE_DEVICES": visible}.items():
            if value is None:
                monkeypatch.delenv(name, raising=False)
            else:
                monkeypatch.setenv(name, value)

    yield give
    sys.modules.pop("pynvml", None)
