"""TensorFlow that only reads data leaves GPUs and TPUs to the other framework; a stub stands in."""

import os
import sys
from types import SimpleNamespace

import pytest

from kerasdist.keras_compat import data

GPUS, TPUS = ["gpu 0", "gpu 1"], ["tpu 0"]


class Recorded:
    def __init__(self, visible=None, growth=None, logical=None, has_started=False):
        self.hidden = []
        self._all = {"GPU": GPUS, "TPU": TPUS}
        self._visible = {**self._all, **(visible or {})}
        self._has_started = has_started
        self.experimental = SimpleNamespace(get_memory_growth=lambda _: growth)
        self.get_logical_device_configuration = lambda _: logical
        self.list_physical_devices = self._all.__getitem__
        self.get_visible_devices = self._visible.__getitem__

    def set_visible_devices(self, devices, kind):
        if self._has_started:
            raise RuntimeError("Visible devices cannot be modified after being initialized")
        assert devices == []
        self.hidden.append(kind)


@pytest.fixture
def leave(monkeypatch):
    """Calls the function under test with a stub of TensorFlow; returns what it hid."""
    monkeypatch.delenv("TF_FORCE_GPU_ALLOW_GROWTH", raising=False)

    def left(backend="jax", **facts):
        config = Recorded(**facts)
        monkeypatch.setattr(data, "backend_name", lambda: backend)
        monkeypatch.setitem(sys.modules, "tensorflow", SimpleNamespace(config=config))
        data.leave_accelerators()
        return config.hidden

    yield left
    os.environ.pop("TF_FORCE_GPU_ALLOW_GROWTH", None)


@pytest.mark.parametrize(
    ("facts", "hidden"),
    [
        ({"backend": "jax"}, ["GPU", "TPU"]),
        ({"backend": "torch"}, ["GPU", "TPU"]),
        ({"backend": "tensorflow"}, []),
        # What the user has chosen stays, and memory that the user has limited.
        ({"visible": {"GPU": GPUS[:1]}}, ["TPU"]),
        ({"visible": {"GPU": [], "TPU": []}}, []),
        ({"growth": True}, ["TPU"]),
        ({"growth": False}, ["TPU"]),
        ({"logical": ["half"]}, ["TPU"]),
        ({"has_started": True}, []),
    ],
)
def test_accelerators_are_hidden_from_a_reader_alone(leave, facts, hidden):
    assert leave(**facts) == hidden
    if facts.get("backend") == "tensorflow":
        assert "TF_FORCE_GPU_ALLOW_GROWTH" not in os.environ


def test_a_tensorflow_that_comes_later_takes_what_it_needs(leave, monkeypatch):
    monkeypatch.setattr(data, "backend_name", lambda: "jax")
    monkeypatch.delitem(sys.modules, "tensorflow", raising=False)
    data.leave_accelerators()
    assert os.environ["TF_FORCE_GPU_ALLOW_GROWTH"] == "true"
    monkeypatch.setenv("TF_FORCE_GPU_ALLOW_GROWTH", "false")
    data.leave_accelerators()
    assert os.environ["TF_FORCE_GPU_ALLOW_GROWTH"] == "false"
