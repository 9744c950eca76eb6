"""`jit_compile=True` in workers on PyTorch: the numbers of code that is not compiled."""

from functools import partial
from unittest.mock import patch

from tests.conformance.actions import quiet_fit
from tests.conformance.compare import NORMAL
from tests.conformance.lazy import keras, torch
from tests.conformance.models import dense, regression, stack
from tests.conformance.registry import case

ACTS = [quiet_fit(*regression(8), batch_size=4)]


def normalized(*more, **options):
    normal = keras.layers.BatchNormalization(momentum=0.5)
    return stack([keras.layers.Dense(6), normal, *more, keras.layers.Dense(1)], "sgd", **options)


def compiling_by(backend):
    return patch("torch.compile", partial(torch.compile, backend=backend))


@case("worker_compilation", backends=("torch",), replicas=(2,))
def compiled_with_collectives(lab):
    """Statistics of the global batch and masks are in one piece of compiled code."""
    from kerasdist import keras_compat

    build = lambda **options: normalized(keras.layers.Dropout(0.5), **options)  # noqa: E731
    keras_compat.is_in_layer()  # what is known of Keras's threads then, compiled steps read too
    _, expected = lab.run(build, ACTS, lab.strategy())
    counters = torch._dynamo.utils.counters
    counters.clear()
    # One graph forward and one backward, which torch then runs as they are.
    with compiling_by("aot_eager"):
        _, actual = lab.run(lambda: build(jit_compile=True), ACTS, lab.strategy())
    lab.equal(expected.parts(True), actual.parts(True))
    lab.check(counters["stats"]["unique_graphs"] == 1, "the model is in several pieces")
    lab.check(not counters["graph_break"], f"{dict(counters['graph_break'])}")


@case("worker_compilation", backends=("torch",), replicas=(2,))
def without_a_compiler(lab):
    """Where the compiler is missing on one worker, one warning says so, and numbers are equal."""

    def missing(graph, inputs):
        raise RuntimeError("no C++ compiler here")

    _, expected = lab.run(dense, ACTS)
    with lab.told("runs uncompiled") as told, compiling_by(missing if lab.job.rank else "eager"):
        _, actual = lab.run(lambda: dense(jit_compile=True), ACTS, lab.strategy())
    lab.equal(expected.parts(True), actual.parts(True))
    are_right = ["no C++ compiler here" in one for one in told]
    lab.check(are_right == [True] * lab.job.rank, f"{told}")


@case("worker_compilation", backends=("torch",), replicas=(2,))
def compiled_statistics_of_each_worker(lab):
    """Moving statistics of each worker's rows, assigned in compiled code, are averaged."""
    strategy = lab.strategy(batch_norm="per_replica")
    _, expected = lab.run(normalized, ACTS, strategy)
    with compiling_by("aot_eager"):
        _, actual = lab.run(lambda: normalized(jit_compile=True), ACTS, strategy)
    lab.equal(expected.parts(True), actual.parts(True), NORMAL)
