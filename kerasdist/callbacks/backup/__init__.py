"""Backups of a training run, and how another process goes on from them."""
