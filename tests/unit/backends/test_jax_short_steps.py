"""Short steps on JAX's CPU devices, which once stalled."""

from tests.environment import CPU_DEVICES, values
from tests.fresh import ROOT, run_python


def test_short_steps_on_four_devices_finish():
    """See `jax/mesh/placement.py`. The process that stalls aborts after 40 seconds."""
    output = run_python(
        *("benchmarks/short_steps.py", "--here", "--steps", "2000", "--devices", "4"),
        seconds=600,
        KERAS_BACKEND="jax",
        **values(CPU_DEVICES),
        PYTHONPATH=str(ROOT),
    )
    assert "2000 steps" in output
