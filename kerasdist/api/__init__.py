"""The API of `tf.distribute`: base class of strategies, replica contexts, values, options."""
