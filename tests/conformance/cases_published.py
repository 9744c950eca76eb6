"""Examples of keras.io whose float32 runs differ visibly: in double precision they do not."""

from tests.conformance import published
from tests.conformance.actions import fit
from tests.conformance.cases_float64 import in_double
from tests.conformance.compare import Tolerance
from tests.conformance.registry import case

N, BATCH = 14, 7

# Measured: from 1e-13 to 6e-12 after four steps; float32 runs of the same differ by up to 1e-3.
GROWN = Tolerance(1e-9, 1e-9, "float64 rounding, grown in normalized layers")


def train(lab, build, x, y):
    lab.same(build, fit(x, y, batch_size=BATCH, epochs=2, shuffle=False), tolerance=GROWN)


@case("published models in float64", replicas=(2,), like="float64.normalization")
@in_double
def siamese_contrastive(lab):
    """keras.io's siamese_contrastive: batch normalization over distances."""
    x, y = published.siamese_data(N)
    train(lab, published.siamese, x, y)


@case("published models in float64", replicas=(2,), like="float64.normalization")
@in_double
def oxford_pets_segmentation(lab):
    """keras.io's oxford_pets_image_segmentation: a U-Net of separable convolutions."""
    x, y = published.u_net_data(N)
    train(lab, published.u_net, x, y)


@case("published models in float64", replicas=(2,), like="float64.normalization")
@in_double
def pointnet_segmentation(lab):
    """keras.io's pointnet_segmentation: a penalty that mixes examples, momentum 0."""
    x, y = published.point_net_data(N)
    # XLA without optimization, as these tests have it on JAX, loses the place of a maximum: there
    # plain Keras's own gradient differs from that of its single steps.
    pooled = "Average" if lab.backend == "jax" else "Max"
    train(lab, lambda: published.point_net(pooled=pooled), x, y)
