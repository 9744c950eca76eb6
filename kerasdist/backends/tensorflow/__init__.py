"""The TensorFlow backend: replicas run under ``tf.distribute``'s native strategies."""
