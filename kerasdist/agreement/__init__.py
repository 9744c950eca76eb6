"""Checks that everything is equal on all workers that must be equal when they compute together."""
