"""Code that all other packages of kerasdist use, and that needs neither Keras nor a framework."""

__version__ = "0.1.0"
