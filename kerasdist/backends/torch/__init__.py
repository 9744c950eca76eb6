"""PyTorch: replicas are threads of one process; in a job each worker process is one replica."""
