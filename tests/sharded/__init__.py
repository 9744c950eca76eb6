"""The suites' cases on JAX, with state that the replicas divide (`sharding=`)."""
