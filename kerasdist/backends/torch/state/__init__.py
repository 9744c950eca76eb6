"""Variables of replicas, and their shards."""
