"""How workers of a job find each other."""
