"""Short steps on several CPU devices of JAX come to an end: see `jax/backpressure.py`."""

from tests.environment import CPU_DEVICES, values
from tests.fresh import ROOT, run_python


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
