"""The examples of tf.distribute's docstrings, as they stand; `docs/tf-distribute-names.md`."""

from tests.conformance import registry
from tests.facade.case import OWN, PAIR
from tests.fresh import run_fresh

# In a process of their own, as a reader of the page runs them.
SCRIPT = """
import kerasdist as kd

kd.config.set_logical_cpu_devices(4)
from tests.facade import examples

for difference in examples.differences({backend!r}):
    print("DIFFERENCE", difference)
"""


def as_they_stand(lab):
    """Each example of the installed TensorFlow does what the page of names and examples says."""
    said = run_fresh(SCRIPT.format(backend=lab.backend), KERAS_BACKEND=lab.backend)
    lab.check(
        "DIFFERENCE" not in said,
        f"expected each example to run, or an entry in examples_known.py:\n{said}",
    )


if registry.KIND == "cpu":
    registry.case(OWN, replicas=PAIR)(as_they_stand)
