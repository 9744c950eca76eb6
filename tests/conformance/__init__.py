"""The exactness suite: what a strategy computes, against plain Keras on one device."""
