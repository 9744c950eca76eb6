"""torch's own modules on a worker, of whose buffers and optimizers Keras knows nothing."""

from __future__ import annotations

import functools
from functools import cache
from typing import Any

import keras

from kerasdist import context
from kerasdist.backends.torch.modules import refuse_own_batch_norm, refuse_torch_optimizers
from kerasdist.backends.torch.workers.collectives import WorkerCollectives
from kerasdist.backends.torch.workers.fit_state import FitState


@cache
def install() -> None:
    """Lets a worker see which torch modules a step calls, once in a process."""
    refuse_torch_optimizers()
    original = keras.layers.TorchModuleWrapper.call

    @functools.wraps(original)
    def call(wrapper: Any, *args: Any, training: Any = None, **kwargs: Any) -> Any:
        collectives = getattr(context.replica(), "collectives", None)
        if isinstance(collectives, WorkerCollectives) and training is not False:
            wrapper.train()
            refuse_own_batch_norm(wrapper.module)
            if isinstance(collectives.state, FitState):
                collectives.state.note_buffers(wrapper.module.buffers())
        return original(wrapper, *args, training=training, **kwargs)

    setattr(keras.layers.TorchModuleWrapper, "call", call)  # noqa: B010  the signatures differ
