"""When replicas run at the same time: in a fresh process, as Keras fixes its backend."""

import json

import pytest

from tests.fresh import run_fresh

SCRIPT = """
import json
import kerasdist as kd
import keras, numpy as np, torch
from kerasdist.backends.torch.replicas import TorchReplicaSet
from kerasdist.backends.torch.rendezvous import Rendezvous

seen = []
begin = Rendezvous.begin

def watched(self, count, *, turns):
    seen.append(turns)
    return begin(self, count, turns=turns)

Rendezvous.begin = watched

class Own(keras.layers.Layer):
    def call(self, x):
        self.kept = x  # what a replica keeps here, another one would overwrite
        return self.kept * 1.0

def drawing_loss(y_true, y_pred):
    return keras.ops.mean(keras.ops.square(y_true - y_pred)) * (1 + 0 * torch.rand(()))

L = keras.layers
WIDE = [L.Dense(256, "relu"), L.Dense(256, "relu")]
CASES = {
    "small": ([L.Dense(4)], "mse"),
    "wide": (WIDE, "mse"),
    "wide with dropout": ([L.Dense(512, "relu"), L.Dropout(0.5), L.Dense(512)], "mse"),
    "a layer of the user's": ([L.Dense(512), Own(), L.Dense(512)], "mse"),
    "a cell with dropout": ([L.Reshape((8, 8)), L.LSTM(256, dropout=0.2)], "mse"),
    "a cell without": ([L.Reshape((8, 8)), L.LSTM(256)], "mse"),
    "a loss that draws": ([L.Dense(512), L.Dense(512)], drawing_loss),
}
# Without the check of the first batch, which takes steps of its own.
strategy = kd.MirroredStrategy(["cpu:0", "cpu:1"], check="off")
rng = np.random.default_rng(0)
x, y = rng.normal(size=(256, 64)).astype("float32"), rng.normal(size=(256, 1)).astype("float32")
torch.set_num_threads(2)
told = {}

def watch(strategy, cases, label=""):
    for name, (layers, loss) in cases.items():
        with strategy.scope():
            model = keras.Sequential([keras.Input((64,)), *layers, L.Dense(1)])
            model.compile("sgd", loss)
        seen.clear()
        model.fit(x, y, batch_size=64, verbose=0)
        told[name + label] = list(seen)

watch(strategy, CASES)
TorchReplicaSet.on_cpu = property(lambda self: False)
ON_GPUS = {name: one for name, one in CASES.items() if name[:4] != "wide"}
watch(kd.MirroredStrategy(["cpu:0", "cpu:1"], check="off"), ON_GPUS, " on GPUs")
told["threads"] = torch.get_num_threads()
print(json.dumps(told))
"""

TURNS = [True] * 4
AT_ONCE = [True, False, False, False]  # the first step shows whether anything draws


@pytest.fixture(scope="module")
def told():
    return json.loads(run_fresh(SCRIPT, KERAS_BACKEND="torch").splitlines()[-1])


@pytest.mark.parametrize(
    ("model", "turns"),
    [
        ("small", TURNS),
        ("wide", AT_ONCE),
        ("wide with dropout", AT_ONCE),
        ("a layer of the user's", TURNS),
        ("a cell with dropout", TURNS),
        ("a cell without", AT_ONCE),
        ("a loss that draws", TURNS),
        ("small on GPUs", AT_ONCE),
        ("a layer of the user's on GPUs", TURNS),
        ("a cell with dropout on GPUs", TURNS),
        ("a loss that draws on GPUs", TURNS),
    ],
)
def test_pace(told, model, turns):
    assert told[model] == turns


def test_the_callers_threads_are_given_back(told):
    assert told["threads"] == 2
