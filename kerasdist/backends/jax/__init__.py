"""JAX: `fit` is one global program over a mesh of devices, and XLA divides the work."""
