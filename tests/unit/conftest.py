"""Unit tests run Keras on NumPy: no framework, so arithmetic alone is tested."""

import os

os.environ["KERAS_BACKEND"] = "numpy"
