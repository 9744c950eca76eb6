"""Variables of replicas, and state that workers divide."""
