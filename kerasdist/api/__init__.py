"""The names of `tf.distribute`: the strategies' base class, replica contexts, values, options."""
