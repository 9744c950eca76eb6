"""The facade's suite: contract C2, custom loops with tf.distribute's meaning, on three backends."""
