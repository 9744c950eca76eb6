"""What all packages stand on, without Keras and without a framework."""

__version__ = "0.1.0"
