"""What is not one device's is found at the first batch, and nothing else is."""

import contextlib
import logging
import warnings

from tests.conformance.lab import fresh
from tests.conformance.lazy import kd, keras
from tests.conformance.mixing import EXAMPLES
from tests.conformance.registry import case
from tests.conformance.unmixing import MODELS

WARNED = "does not compute under"


def warned(model, batch, **options):
    """What `fit` on one batch says about one device."""
    keras.utils.set_random_seed(5)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model.fit(*batch, batch_size=12, shuffle=False, verbose=0, **options)
    return [str(one.message) for one in said if WARNED in str(one.message)]


@contextlib.contextmanager
def checked():
    """What the check did, by its debug lines: a check that is left out is silent, too."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(
        "compared" if " equals " in record.getMessage() else record.getMessage()
    )
    logger = logging.getLogger("kerasdist")
    level = logger.level
    logger.setLevel(logging.DEBUG)
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def example_case(build, repaired: bool):
    def check(lab):
        fresh()
        with lab.strategy().scope():
            model, batch = build(lab.backend, repaired=repaired)
        report = kd.compare_with_one_device(model, *batch)
        said = warned(model, batch)
        if repaired:
            lab.check(report.equal, f"nothing should differ, received: {report}")
            lab.check(not said, f"nothing should be said, received: {said}")
        else:
            lab.check(not report.equal, f"it should differ, received: {report}")
            lab.check(len(said) == 1, f"one warning should come, received: {said}")
            lab.check("global_batch" in said[0], f"it should say what to do, received: {said}")
            lab.check("mixing.py" in said[0] or "steps_" in said[0], f"no place, received: {said}")
            lab.check(not warned(model, batch), "it should be said once")

    kind = "repaired" if repaired else "as published"
    title = f"The first-batch check: {build.__doc__.partition(':')[0].rstrip('.')}, {kind}"
    name = f"{build.__name__}_{'repaired' if repaired else 'found'}"
    backends = ("tensorflow", "torch")
    case("the first-batch check", name=name, title=title, backends=backends, replicas=(2, 3))(check)


for _build in EXAMPLES:
    example_case(_build, repaired=False)
    example_case(_build, repaired=True)


@case(
    "the first-batch check",
    backends=("tensorflow", "torch"),
    replicas=(2, 3),
    seconds=150.0,
)
def silent(lab):
    """The first-batch check: nothing is said of thirty models that mix no examples."""
    strategy = lab.strategy()
    complaints = []
    for name, (build, data) in MODELS.items():
        fresh()
        with strategy.scope():
            model = build(lab.backend)
        model.run_eagerly = True  # a graph of each would take longest
        x, y, *weights = data()
        with checked() as checks:
            said = warned(model, (x, y), **dict(zip(["sample_weight"], weights, strict=False)))
        if said or checks != ["compared"]:
            complaints.append(f"{name}: {checks} {said}")
    lab.check(not complaints, "\n".join(complaints))
