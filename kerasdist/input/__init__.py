"""Reads datasets, and divides their global batches among workers and replicas."""
