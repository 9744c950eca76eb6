"""What is JAX's own in custom loops; run by test_jax_runner.py in a process of its own."""
