"""What must be equal on all workers when they compute together."""
