"""Code that the rest of kerasdist is built on; it needs neither Keras nor a framework."""

__version__ = "0.1.0"
