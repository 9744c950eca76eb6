"""What `kerasdist test` and `kerasdist bench` do in a worker."""

import contextlib
import io
import json

import numpy as np

from tests import environment
from tests.conformance.lazy import LazyModule, kd, keras
from tests.facade.case import case

worker = LazyModule("kerasdist.cli.diagnostics.cluster_test_worker")


@case(replicas=(2,))
def collectives_and_bandwidth(lab):
    """`kerasdist test` checks the results of sum, gather and broadcast, and reports wrong ones."""
    strategy = lab.strategy()
    found = [*worker.collectives(strategy), worker.bandwidth(strategy)]
    lab.equal([one.check for one in found], ["sum", "gather", "broadcast", "bandwidth"])
    lab.equal({one.verdict for one in found}, {"ok"})
    wrong = worker._judged(strategy, "sum", [np.ones(3), np.array([1.0, 1.0, 2.0])], np.ones(3))
    lab.equal(wrong.verdict, "problem")
    lab.check("[1.0, 1.0, 2.0] on worker 0, expected [1.0, 1.0, 1.0]" in wrong.found, wrong.found)


# The other backends' are among the cases of workers.
@case(backends=("torch",), replicas=(3,))
def equal_to_one_device(lab):
    """`kerasdist test` compares the weights after 20 steps with those of one device."""
    [found] = worker.equality(lab.strategy())
    lab.check(found.verdict == "ok", str(found))
    lab.check("weights equal to one device: " in found.found, found.found)
    [found] = worker.equality(kd.MirroredStrategy(lab.devices, batch_norm="per_replica"))
    lab.check(found.verdict == "problem", str(found))


@case(replicas=(2,))
def fit_is_measured(lab, strategy):
    """In a worker of `kerasdist bench`, `fit` prints its time without the first epoch."""
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        model.compile("sgd", "mse")
    x = np.zeros((20, 3), "float32")
    arguments = {"batch_size": 5, "verbose": 0, "validation_split": 0.25}
    with (
        environment.variables(KERASDIST_BENCH="1"),
        contextlib.redirect_stdout(io.StringIO()) as printed,
    ):
        model.fit(x, x[:, :2], epochs=3, **arguments)
    with contextlib.redirect_stdout(io.StringIO()) as nothing:
        model.fit(x, x[:, :2], **arguments)
    lab.equal(nothing.getvalue(), "")
    mark, _, text = printed.getvalue().strip().partition(": ")
    lab.equal(mark, "kerasdist-result")
    told = json.loads(text)
    lab.check(told.pop("seconds") > 0, "it took no time")
    all_reduce = told.pop("all_reduce")
    lab.equal((all_reduce["replicas"], all_reduce["bytes"]), (2, 1 << 20))
    expected = {
        "backend": lab.backend,
        "workers": 1,
        "replicas": 2,
        "device": lab.devices[0],
        "batch": 5,
        "steps": 6,  # of two epochs
        "with_compilation": False,
        "parameters": 8,
    }
    lab.equal(told, expected)
