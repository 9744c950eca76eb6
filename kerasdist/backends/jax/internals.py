"""What kerasdist holds on to in JAX that is not public, each internal once."""

from __future__ import annotations
