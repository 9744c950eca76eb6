"""`jit_compile=True` in workers on PyTorch: the numbers of code that is not compiled."""

from functools import partial
from unittest.mock import patch

from tests.conformance.actions import quiet_fit
from tests.conformance.compare import NORMAL
from tests.conformance.lazy import keras
from tests.conformance.models import dense, regression, stack
from tests.conformance.registry import case


@case("worker_compilation", backends=("torch",), replicas=(2,))
def compiled_with_collectives(lab):
    """Statistics of the global batch and masks are in one piece of compiled code."""
    import torch

    from kerasdist import keras_compat

    def build(**options):
        layers = keras.layers
        normal = layers.BatchNormalization(momentum=0.5)
        return stack(
            [layers.Dense(6), normal, layers.Dropout(0.5), layers.Dense(1)], "sgd", **options
        )

    x, y = regression(8)
    acts = [quiet_fit(x, y, batch_size=4)]
    keras_compat.is_in_layer()  # what is known of Keras's threads then, compiled steps read too
    _, expected = lab.run(build, acts, lab.strategy())
    counters = torch._dynamo.utils.counters
    counters.clear()
    # One graph forward and one backward, which torch then runs as they are.
    with patch.object(torch, "compile", partial(torch.compile, backend="aot_eager")):
        _, actual = lab.run(lambda: build(jit_compile=True), acts, lab.strategy())
    lab.equal(expected.parts(True), actual.parts(True))
    pieces = counters["stats"]["unique_graphs"]
    lab.check(pieces == 1, f"the model is in {pieces} pieces")
    lab.check(not counters["graph_break"], f"{dict(counters['graph_break'])}")


@case("worker_compilation", backends=("torch",), replicas=(2,))
def without_a_compiler(lab):
    """Where the compiler is missing on one worker, one warning says so, and numbers are equal."""
    import torch

    def missing(graph, inputs):
        raise RuntimeError("no C++ compiler here")

    x, y = regression(8)
    acts = [quiet_fit(x, y, batch_size=4)]
    _, expected = lab.run(dense, acts)
    backend = missing if lab.job.rank else "eager"
    compiler = patch.object(torch, "compile", partial(torch.compile, backend=backend))
    with lab.told("runs uncompiled") as told, compiler:
        _, actual = lab.run(lambda: dense(jit_compile=True), acts, lab.strategy())
    lab.equal(expected.parts(True), actual.parts(True))
    lab.check(len(told) == lab.job.rank, f"{told}")
    lab.check(all("no C++ compiler here" in one for one in told), f"{told}")


@case("worker_compilation", backends=("torch",), replicas=(2,))
def compiled_statistics_of_each_worker(lab):
    """Moving statistics of each worker's rows, assigned in compiled code, are averaged."""
    import torch

    def build(**options):
        layers = keras.layers
        normal = layers.BatchNormalization(momentum=0.5)
        return stack([layers.Dense(6), normal, layers.Dense(1)], "sgd", **options)

    x, y = regression(8)
    acts = [quiet_fit(x, y, batch_size=4)]
    strategy = lab.strategy(batch_norm="per_replica")
    _, expected = lab.run(build, acts, strategy)
    with patch.object(torch, "compile", partial(torch.compile, backend="aot_eager")):
        _, actual = lab.run(lambda: build(jit_compile=True), acts, strategy)
    lab.equal(expected.parts(True), actual.parts(True), NORMAL)
