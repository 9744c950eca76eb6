"""Keeps Keras's own data parallelism on PyTorch, from 3.16 on, from what a job does already.

That Keras wraps every model by ``DistributedDataParallel``, and sums every metric, as soon as torch
has a default process group, which a job makes. A strategy's model has the gradients and metrics of
all workers, and never comes here. Another model in a job's process belongs to its worker alone, and
what the chief evaluates in a callback would wait for the others for good. A group that the script
has made itself serves the models outside of the scope, as in plain Keras.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from kerasdist import keras_compat
from kerasdist.backends.torch.workers.process_group import is_default_group_ours


@cache
def install() -> None:
    """Puts the hooks into Keras, once in a process."""
    keras_compat.install(initialize_ddp=_initialize_ddp, alone_result=_metrics_result)


def _initialize_ddp(original: Callable[..., None], model: object) -> None:
    if not is_default_group_ours():
        original(model)


def _metrics_result(original: Callable[..., Any], model: object) -> Any:
    return keras_compat.metrics_here(model) if is_default_group_ours() else original(model)
