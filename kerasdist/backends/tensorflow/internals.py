"""What kerasdist holds on to in TensorFlow that is not public, each internal once."""

from __future__ import annotations
