"""Cases that call `tf.distribute` and kerasdist alike, and compare what comes out."""

import zlib

REPLICAS = (2, 3)


def replicas_of(case: str) -> int:
    """How many replicas a case has: the one or the other, by its name."""
    return REPLICAS[zlib.crc32(case.encode()) % len(REPLICAS)]
