"""What each backend does with the GPUs that a worker has chosen; each in a process of its own."""

import pytest

from tests.fresh import run_fresh

OF_ALL = """
import os, types
os.environ.pop("JAX_PLATFORMS", None)
import kerasdist as kd
from kerasdist.backends import registry

def job():
    return types.SimpleNamespace(
        rank=0, num_workers=2, is_chief=True, chief_address="127.0.0.1:1",
        gather_addresses=lambda: ("127.0.0.1:1", "127.0.0.1:2"),
        is_on_one_machine=True, at_leave=lambda callback: None, own_port=lambda: None,
        timeouts=types.SimpleNamespace(join=60.0, heartbeat=60.0, meeting=60.0),
    )

def names(devices):
    return [str(device) for device in devices]

backend = registry.current()
"""

JAX = """
import jax

initialized = []
jax.distributed.initialize = lambda **arguments: initialized.append(arguments)
from kerasdist.backends.jax import backend as module

plugins = []
module.metadata = types.SimpleNamespace(entry_points=lambda group: plugins)
assert backend.uses_gpus() is False
plugins.append(types.SimpleNamespace(name="xla_cuda12"))
assert backend.uses_gpus() is True
for chosen in ("2,3", "all"):  # the user's own choice
    jax.config.update("jax_cuda_visible_devices", chosen)
    assert backend.uses_gpus() is (None if chosen == "2,3" else True)
os.environ["JAX_LOCAL_DEVICE_IDS"] = "1"
assert backend.uses_gpus() is None
del os.environ["JAX_LOCAL_DEVICE_IDS"]
assert backend.connect(job(), [2, 3]) == ()  # JAX sees none of them
assert initialized[-1]["local_device_ids"] == [2, 3]
assert jax.config.jax_platforms is None
backend.connect(job(), None)
assert initialized[-1]["local_device_ids"] is None
assert jax.config.jax_platforms is None
backend.connect(job(), [])  # CPU devices: GPUs are left alone
assert initialized[-1]["local_device_ids"] is None
assert jax.config.jax_platforms == "cpu"
assert backend.uses_gpus() is None
"""

TENSORFLOW = """
import tensorflow as tf
from kerasdist.backends.tensorflow.private import strategies

made = []
started = []
tf.config.list_physical_devices = lambda kind: [f"{kind} {index}" for index in range(4)]
tf.config.get_visible_devices = tf.config.list_physical_devices
tf.config.set_visible_devices = lambda devices, kind: made.append((devices, kind))
strategies.start_server = lambda addresses, rank: started.append(list(made))

tf.test.is_built_with_gpu_support = lambda: True
assert backend.uses_gpus() is True
logical = types.SimpleNamespace(name="/device:GPU:0")
tf.config.list_logical_devices = lambda kind: [logical, logical]
assert names(backend.connect(job(), [1, 3])) == ["gpu:0", "gpu:1"]
assert started == [[(["GPU 1", "GPU 3"], "GPU")]]  # before TensorFlow starts
assert backend.connect(job(), None) == ()
assert len(made) == 1
backend.connect(job(), [])
assert made[-1] == ([], "GPU")
backend.connect(job(), [3, 4])  # one that TensorFlow does not see: told afterwards
assert made[-1] == (["GPU 3"], "GPU")
for hidden in ([], ["GPU 1"]):  # the user's own choice
    tf.config.get_visible_devices = lambda kind: hidden
    assert backend.uses_gpus() is None
"""

TORCH = """
import keras, torch
from kerasdist.backends.torch import backend as module
from kerasdist.backends.torch.replica.placing import torch_device
from kerasdist.core.devices import Device
from kerasdist.errors import UnsupportedError
from keras.src.backend.torch.core import get_device

torch.version.cuda = torch.version.hip = None
assert backend.uses_gpus() is False
torch.version.cuda = "12.8"
assert backend.uses_gpus() is True

# Macs and Intel's GPUs: Keras would use them, so auto() and a strategy without names do.
assert str(kd.auto()) == "OneDeviceStrategy(['cpu:0'])"
for kind in ("mps", "xpu"):
    if kind == "mps":
        torch.backends.mps.is_available = lambda: True
    else:
        torch.backends.mps.is_available = lambda: False
        torch.xpu.device_count = lambda: 2
    strategy = kd.OneDeviceStrategy(kind) if kind == "xpu" else kd.auto()
    assert names(strategy.replica_set.devices) == [f"{kind}:0"]
    assert torch_device(strategy.replica_set.devices[0]) == torch.device(kind, 0)
    with strategy.scope():
        assert get_device() == ("mps" if kind == "mps" else "xpu:0")
for refused in (kd.MirroredStrategy, lambda: backend.replica_set([Device("mps", 0)], None, job())):
    try:
        refused()
    except UnsupportedError as error:
        assert "KERASDIST_CPU_DEVICES" in str(error)
    else:
        raise AssertionError(refused)

# CPU devices that the variable chooses come first.
os.environ["KERASDIST_CPU_DEVICES"] = "2"
for strategy in (kd.auto(), kd.MirroredStrategy()):
    assert names(strategy.replica_set.devices) == ["cpu:0", "cpu:1"]
torch.xpu.device_count = lambda: 0

# torch sets nothing aside on GPUs, and numbers them as before.
torch.cuda.device_count = lambda: 4
module.connect = lambda job: None
for own, expected in ((None, []), ([2], [2]), ([3, 4], [3]), ([], [])):
    assert names(backend.connect(job(), own)) == [f"gpu:{index}" for index in expected]
    assert len(backend.devices("gpu")) == 4
"""


@pytest.mark.parametrize(
    ("backend", "code"), [("jax", JAX), ("tensorflow", TENSORFLOW), ("torch", TORCH)]
)
def test_a_worker_has_its_own_alone(backend, code):
    run_fresh(OF_ALL + code, KERAS_BACKEND=backend)
