"""The backend of PyTorch: replicas are threads of one process; in a job each worker has one."""
