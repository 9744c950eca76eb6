"""The training of models made under a strategy: hooks into Keras, never a loop of its own."""
