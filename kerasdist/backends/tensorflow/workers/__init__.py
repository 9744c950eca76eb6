"""Workers of a job: groups of `tf.distribute`, datasets of workers."""
