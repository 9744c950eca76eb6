"""Checksums of variables, by which workers compare their values bit by bit."""

from __future__ import annotations

from typing import Any

import numpy as np

_WORD = 8
_MODULUS = 1 << 64


def of_array(array: Any) -> int:
    """Returns the sum of an array's bytes, taken as 64-bit numbers."""
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    whole = data.size - data.size % _WORD
    total = int(data[:whole].view(np.uint64).sum(dtype=np.uint64))
    return (total + int.from_bytes(data[whole:].tobytes(), "little")) % _MODULUS
