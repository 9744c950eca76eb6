"""The suites' cases with state that the replicas divide (`sharding=`), where a backend has it."""
