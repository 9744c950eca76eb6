"""The TensorFlow backend: replicas run under the native strategies of ``tf.distribute``."""
