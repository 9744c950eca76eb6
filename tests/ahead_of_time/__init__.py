"""The `fit` program on JAX, compiled for accelerators that are not there."""
