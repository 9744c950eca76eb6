"""What torch and Keras remember by thread, carried from the calling thread to a replica's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, final

import torch

from kerasdist import keras_seam


@final
@dataclass(frozen=True)
class ThreadSettings:
    """The settings of one thread.

    Attributes:
        keras_state: Keras's scopes and policies.
        gradients: Whether torch records operations for the backward pass.
        inference: Whether torch is in inference mode.
        autocast: For each kind of device on which torch casts by itself, the type it casts to.
    """

    keras_state: dict[str, Any]
    gradients: bool
    inference: bool
    autocast: tuple[tuple[str, torch.dtype], ...]

    @classmethod
    def of_this_thread(cls) -> ThreadSettings:
        """Returns the settings of the calling thread."""
        return cls(
            keras_state=keras_seam.copy_thread_state(),
            gradients=torch.is_grad_enabled(),
            inference=torch.is_inference_mode_enabled(),
            autocast=tuple(
                (kind, torch.get_autocast_dtype(kind))
                for kind in ("cpu", "cuda")
                if torch.is_autocast_enabled(kind)
            ),
        )

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Gives the settings to the calling thread, which is a replica's own."""
        keras_seam.paste_thread_state(self.keras_state)
        if self.gradients and not self.inference and not self.autocast:  # as a new thread has it
            yield
            return
        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(self.gradients))
            if self.inference:
                stack.enter_context(torch.inference_mode())
            for kind, dtype in self.autocast:
                stack.enter_context(torch.autocast(kind, dtype))
            yield


def compute_with(threads: int) -> None:
    """Lets torch compute with so many threads for the thread that calls.

    Args:
        threads: At least 1.
    """
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
