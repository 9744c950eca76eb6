"""PyTorch: one thread per replica in one process, or one process per replica in a job."""
