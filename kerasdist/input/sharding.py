"""The arithmetic of dividing a global batch: pure functions of integers, written once.

A batch of ``total`` examples is cut into consecutive pieces, one a replica, as equal as can be, the
longer ones first. The order of the examples is kept, none is dropped, none appears twice, and when
there are fewer examples than replicas, the replicas without one are the last.
"""

from __future__ import annotations

from collections.abc import Sequence

# One device computes at most so many times what a replica does.
_TIMES = 4
# As many examples of each replica show well whether code mixes them.
_ENOUGH = 8


def piece_sizes(total: int, replicas: int) -> tuple[int, ...]:
    """Returns how many examples each replica holds.

    Args:
        total: Number of examples in the global batch, at least 0.
        replicas: Number of replicas, at least 1.

    Returns:
        One size a replica. They sum to `total`, differ by at most 1, and never increase.

    Raises:
        ValueError: If `total` is negative or `replicas` is less than 1.
    """
    if total < 0:
        raise ValueError(f"Expected a batch of at least 0 examples. Received: total={total}")
    if replicas < 1:
        raise ValueError(f"Expected at least one replica. Received: replicas={replicas}")
    share, rest = divmod(total, replicas)
    return tuple(share + (replica < rest) for replica in range(replicas))


def piece_bounds(total: int, replicas: int) -> tuple[tuple[int, int], ...]:
    """Returns where each replica's piece begins and ends.

    Args:
        total: Number of examples in the global batch, at least 0.
        replicas: Number of replicas, at least 1.

    Returns:
        One pair ``(begin, end)`` a replica, ``end`` not included.
    """
    bounds: list[tuple[int, int]] = []
    begin = 0
    for size in piece_sizes(total, replicas):
        bounds.append((begin, begin + size))
        begin += size
    return tuple(bounds)


def weights(total: int, replicas: int) -> tuple[float, ...]:
    """Returns each replica's share of the examples, the weight of its mean in the global mean.

    Args:
        total: Number of examples in the global batch, at least 0.
        replicas: Number of replicas, at least 1.

    Returns:
        One share a replica; they sum to 1, or are all 0 when the batch is empty.
    """
    return tuple(size / total if total else 0.0 for size in piece_sizes(total, replicas))


def spared(sizes: Sequence[int]) -> tuple[int, ...]:
    """Returns how many examples of each replica are tried where one device may not hold all.

    Args:
        sizes: How many each replica has.
    """
    largest, replicas = max(sizes), len(sizes)
    most = max(largest, min(_ENOUGH * replicas, _TIMES * largest))
    return tuple(min(size, max(1, most // replicas)) for size in sizes)
