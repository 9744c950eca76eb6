"""What `fit` does on JAX: batches, steps, donated state."""
