"""What is JAX's own in custom loops: programs, and where arrays lie."""

from tests.facade.cases_jax import normalization, planned, programs, values  # noqa: F401 (registers their cases)
