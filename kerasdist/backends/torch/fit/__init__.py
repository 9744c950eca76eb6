"""What `fit` does on PyTorch: batches, steps, logs."""
