"""Short steps on several CPU devices of JAX come to an end: see `jax/mesh/placement.py`."""

from tests.environment import CPU_DEVICES, values
from tests.fresh import ROOT, run_fresh, run_python


def test_short_steps_on_four_devices_finish():
    # The process that stalls aborts after 40 seconds, so this can't hang.
    output = run_python(
        *("benchmarks/short_steps.py", "--here", "--steps", "2000", "--devices", "4"),
        seconds=600,
        KERAS_BACKEND="jax",
        **values(CPU_DEVICES),
        PYTHONPATH=str(ROOT),
    )
    assert "2000 steps" in output


HOST_CALLS = """
import os, threading, jax, keras, numpy as np
import kerasdist as kd

strategy = kd.MirroredStrategy(["cpu:0", "cpu:1"])
with strategy.scope():
    total = keras.Variable(0.0, aggregation="mean")
noted = []

@kd.function
def double(x):
    return x * 2

def on_host(x):
    noted.append(float(double(np.asarray(x))))
    return np.float32(1.0)

@kd.function
def step(x):
    def on_replica():
        one = jax.pure_callback(on_host, jax.ShapeDtypeStruct((), "float32"), x.sum())
        total.assign_add(one)
        return one

    return strategy.reduce("SUM", strategy.run(on_replica), axis=None)

watch = threading.Timer(60, lambda: os._exit(3))
watch.start()
for _ in range(30):
    last = step(np.ones((64, 64), "float32"))
assert float(last) == 2.0
watch.cancel()
print(float(total.value), set(noted))
"""


def test_defect_21_code_on_the_host_may_call_a_function():
    """It waited for ever for the step, which waited for it."""
    said = run_fresh(HOST_CALLS, KERAS_BACKEND="jax", **values(CPU_DEVICES))
    assert said.split("\n")[-2] == "30.0 {8192.0}"
