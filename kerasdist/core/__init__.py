"""The lowest layer: code that every other package uses, without Keras and without a framework."""

__version__ = "0.1.0"
