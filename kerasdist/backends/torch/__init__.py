"""The backend of PyTorch: replicas are threads of one process, or in a job one per worker."""
