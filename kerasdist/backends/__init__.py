"""One folder per framework. Each folder implements the interfaces in `base`."""
