"""Replicas as threads: how they run, wait for each other and exchange tensors."""
