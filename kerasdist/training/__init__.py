"""What a model made under a strategy does otherwise: hooks into Keras, never a loop of its own."""
