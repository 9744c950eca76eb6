"""Trains models that were made under a strategy, by hooks into Keras's own loops."""
