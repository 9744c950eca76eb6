"""What all packages stand on, without Keras and without a framework."""
