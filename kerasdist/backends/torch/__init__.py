"""PyTorch: a thread a replica, all of them in one process."""
