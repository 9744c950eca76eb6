"""Custom loops on TensorFlow, on real ``tf.distribute`` objects and on ours: run by the test."""
