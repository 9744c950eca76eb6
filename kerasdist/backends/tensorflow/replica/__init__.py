"""Replicas of `tf.distribute`: how they run, merge and exchange tensors."""
