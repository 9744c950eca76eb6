"""The training of models made under a strategy, by hooks into Keras's own loops."""
