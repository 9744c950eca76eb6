"""TensorFlow: the engine is ``tf.distribute.MirroredStrategy``."""
