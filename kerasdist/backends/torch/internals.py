"""What kerasdist holds on to in PyTorch that is not public, each internal once."""

from __future__ import annotations
