"""The names of `tf.distribute`: strategies' common class, replica contexts, values, options."""
