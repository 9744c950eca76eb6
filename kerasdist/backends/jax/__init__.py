"""JAX: one global program over a mesh of devices; XLA divides the work."""
