"""Runs scripts up to their first step, with one device in place of the described ones.

Each may take 2 GB of memory. Prints a line of JSON a script. Started by test_script.py, since it
needs Keras on JAX.
"""

import json
import resource
import sys
import tempfile
from pathlib import Path

import jax

from kerasdist.backends.jax.ahead_of_time import PlanningBackend, examples_in
from kerasdist.cli.plan.script import first_step
from kerasdist.errors import KerasdistError

MODEL = """
import keras
import numpy as np
import kerasdist as kd

def make():
    hidden = [keras.layers.Dense(4), keras.layers.Dropout(0.5)]
    model = keras.Sequential([*hidden, keras.layers.Dense(1)])
    model.compile("adam", "mse")
    return model

x, y = np.zeros((30, 3), "float32"), np.zeros((30, 1), "float32")
"""
SCRIPTS = {
    "plain": "make().fit(x, y, 10)",
    "train_on_batch": "make().train_on_batch(x, y)",
    "weights": "make().fit(x, y, batch_size=6, class_weight={0: 1.0, 1: 2.0}, steps_per_epoch=2)",
    "steps_per_execution": (
        "m = make(); m.compile('sgd', 'mse', steps_per_execution=3)\nm.fit(x, y, 5)"
    ),
    "validation": "make().fit(x, y, batch_size=6, validation_split=0.25)",
    "TPUStrategy": "with kd.TPUStrategy().scope(): m = make()\nm.fit(x, y, batch_size=15)",
    "auto": "with kd.auto().scope(): m = make()\nm.fit((x[i:i+2], y[i:i+2]) for i in range(9))",
    "overridden": (
        "class M(keras.Model):\n"
        "    def __init__(self): super().__init__(); self.d = keras.layers.Dense(1)\n"
        "    def call(self, x): return self.d(x)\n"
        "    def fit(self, *a, **k): return super().fit(*a, **k)\n"
        "with kd.MirroredStrategy(['gpu:0', 'gpu:1']).scope(): m = M()\n"
        "m.compile('adam', 'mse'); m.fit(x, y, batch_size=7, callbacks=[1 / 2])"
    ),
    "within a machine": (
        "with kd.MirroredStrategy(sharding=kd.Sharding('full', within='host')).scope(): make()"
    ),
    # 34 GB of weights, and as much twice for Adam; what is assigned takes no memory.
    "larger than this machine": (
        "with kd.MirroredStrategy(sharding='full').scope():\n"
        "    layers = [keras.layers.Dense(2**15, use_bias=False) for _ in range(9)]\n"
        "    m = keras.Sequential([*layers, keras.layers.Dense(1)])\n"
        "    m.compile('adam', 'mse')\n"
        "m.build((None, 3))\n"
        "layers[1].kernel.assign(np.broadcast_to(np.float32(0), (2**15, 2**15)))\n"
        "m.fit(x, y, batch_size=10)"
    ),
    "values of large weights": (
        "m = keras.Sequential([keras.layers.Dense(2**15), keras.layers.Dense(2**15)])\n"
        "m.build((None, 2**15))\nm.get_weights()"
    ),
    "another shape": (
        "m = keras.Sequential([keras.layers.Dense(2**15)])\nm.build((None, 2**15))\n"
        "m.layers[0].kernel.assign(x)"
    ),
    "without a step": "make()",
    "exit": "raise SystemExit(3)",
}
FUNCTION = "def make_both(): return make(), (x[:8], y[:8])\ndef wrong(): return make()"


def main():
    with tempfile.TemporaryDirectory() as temporary:
        look_at_all(Path(temporary))


def look_at_all(folder):
    backend = PlanningBackend(jax.devices())
    sys.path.insert(0, str(folder))
    (folder / "of_user.py").write_text(f"{MODEL}\n{FUNCTION}\n")
    names = {name: folder / f"{name.replace(' ', '_')}.py" for name in SCRIPTS}
    for name, path in names.items():
        path.write_text(f"{MODEL}\n{SCRIPTS[name]}\nprint('went on')\n")
    asked = {name: str(path) for name, path in names.items()}
    asked |= {"function": "of_user:make_both", "wrong": "of_user:wrong", "missing": "nowhere.py"}
    of_process, hard = resource.getrlimit(resource.RLIMIT_AS)
    for name, script in asked.items():
        try:
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            most = pages * resource.getpagesize() + 2**31
            resource.setrlimit(resource.RLIMIT_AS, (most, hard))
            step = first_step(script, ["--flag"], backend)
        except (KerasdistError, ValueError) as error:
            found = {"error": str(error)}
        else:
            built = step.model.built and step.model.optimizer.built
            found = {"examples": examples_in(step.batch), "built": built, "by": step.strategy}
            found["in all"] = step.examples
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (of_process, hard))
        print(json.dumps({"name": name, **found}), flush=True)
