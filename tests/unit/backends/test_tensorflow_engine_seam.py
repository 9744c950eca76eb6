"""Tripwires: what kerasdist touches of TensorFlow's private parts is where it should be.

A failure here means that TensorFlow moved something, and
`kerasdist/backends/tensorflow/engine_seam.py` is the file to mend.
"""

import json
import os
import subprocess
import sys

import pytest

TIME_LIMIT_S = 90

PROBE = """
import inspect, json
import kerasdist as kd

kd.config.set_logical_cpu_devices(2)
import keras
import tensorflow as tf
from kerasdist.backends.tensorflow import engine_seam

engine = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
with engine_seam.EngineScope(engine):
    keras.backend.clear_session()
    after_reset = tf.distribute.get_strategy() is engine
    with engine_seam.cross_replica_code_without_merge_call():
        inside = [tf.distribute.in_cross_replica_context(), tf.distribute.has_strategy()]

updated = []

@tf.function
def meet_and_update(value):
    # Where the replicas have met, in a branch: there TensorFlow itself refuses.
    def merged(strategy, value):
        with engine_seam.cross_replica_code_without_merge_call():
            return tf.cond(
                tf.constant(True),
                lambda: tf.__internal__.distribute.interim.maybe_merge_call(
                    lambda strategy: updated.append(strategy) or tf.constant(1.0),
                    tf.distribute.get_strategy(),
                ),
                lambda: tf.constant(0.0),
            )
    return tf.distribute.get_replica_context().merge_call(merged, args=(value,))

engine.run(meet_and_update, args=(tf.constant(2.0),))
print(json.dumps({
    "parameters": {
        part.__name__: list(inspect.signature(part).parameters)
        for part in engine_seam.private_names()
    },
    "after_reset": after_reset,
    "left": not tf.distribute.has_strategy(),
    "inside": inside,
    "updated_once_without_a_strategy": len(updated) == 1 and updated[0] is not engine,
}))
"""


@pytest.fixture(scope="module")
def probe():
    done = subprocess.run(
        [sys.executable, "-c", PROBE],
        env=os.environ | {"KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, f"tensorflow is missing or broken:\n{done.stderr}"
    return json.loads(done.stdout.splitlines()[-1])


def test_the_private_names_take_what_they_are_given(probe):
    assert probe["parameters"] == {
        "_get_default_strategy": [],
        "_push_per_thread_mode": ["context"],
        "_pop_per_thread_mode": [],
        "_ThreadMode": ["dist", "cross", "replica"],
        "maybe_merge_call": ["fn", "strategy", "args", "kwargs"],
    }


def test_a_scope_outlives_clear_session(probe):
    assert probe["after_reset"]
    assert probe["left"]


def test_a_branch_is_updated_without_merge_call(probe):
    assert probe["inside"] == [True, False]
    assert probe["updated_once_without_a_strategy"]
