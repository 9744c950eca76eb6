"""The backend of JAX: `fit` is one program over a mesh of all devices, which XLA partitions."""
