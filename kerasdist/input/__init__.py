"""How a global batch reaches the replicas."""
