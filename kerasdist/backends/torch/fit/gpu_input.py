"""Copies a worker's rows to its GPU while the GPU computes on the batch before.

The rows travel from page-locked memory (`kerasdist.backends.torch.replica.placing.moved`), in a
stream of their own, one batch ahead.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch

from kerasdist.backends.torch.replica.placing import moved
from kerasdist.core.structures import flatten, map_leaves
from kerasdist.input.worker_shard import WorkerShard


def ahead(batches: Iterable[Any], device: torch.device) -> Iterator[Any]:
    """Yields batches of tensors on the host as batches on a GPU; reads one batch ahead."""
    stream = torch.cuda.Stream(device)
    waiting: tuple[Any, Any] | None = None
    for batch in batches:
        with torch.cuda.stream(stream):
            copied = _with_rows(batch, map_leaves(lambda leaf: moved(device, leaf), _rows(batch)))
            following = copied, stream.record_event()
        if waiting is not None:
            yield _arrived(*waiting, device)
        waiting = following
    if waiting is not None:
        yield _arrived(*waiting, device)


def _rows(batch: Any) -> Any:
    return batch.rows if isinstance(batch, WorkerShard) else batch


def _with_rows(batch: Any, rows: Any) -> Any:
    return replace(batch, rows=rows) if isinstance(batch, WorkerShard) else rows


def _arrived(batch: Any, event: Any, device: torch.device) -> Any:
    """Returns a batch that the GPU's next operations find there."""
    current = torch.cuda.current_stream(device)
    current.wait_event(event)
    for leaf in flatten(_rows(batch)):
        if isinstance(leaf, torch.Tensor):
            leaf.record_stream(current)  # made in the other stream, used and freed in this one
    return batch
