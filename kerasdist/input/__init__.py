"""Reads datasets, and divides global batches among workers and replicas."""
