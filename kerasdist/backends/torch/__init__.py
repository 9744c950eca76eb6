"""The backend of PyTorch.

The replicas of one process run in threads. In a job each worker process has one replica.
"""
