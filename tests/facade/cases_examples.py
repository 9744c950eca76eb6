"""The examples of tf.distribute's docstrings, as they stand; `docs/tf-distribute-names.md`."""

from tests.conformance import registry
from tests.facade import examples
from tests.facade.case import OWN, PAIR


def as_they_stand(lab):
    """Each example of the installed TensorFlow does what the page of names and examples says."""
    found = list(examples.differences(lab.backend))
    lab.check(
        not found,
        "expected each example to run, or an entry in examples_known.py:\n" + "\n".join(found),
    )


if registry.KIND == "cpu":
    registry.case(OWN, replicas=PAIR)(as_they_stand)
