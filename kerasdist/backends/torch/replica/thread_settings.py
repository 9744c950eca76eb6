"""Copies the thread-local settings of torch and Keras from the calling thread to a replica's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, final

import torch

from kerasdist import keras_compat


@final
@dataclass(frozen=True)
class ThreadSettings:
    """The settings of one thread.

    Attributes:
        keras_state: Keras's scopes and policies.
        trial: The trial that the thread takes part in.
        gradients: Whether torch records operations for the backward pass.
        inference: Whether torch is in inference mode.
        autocast: The kinds of device for which autocast is on, each with the type it casts to.
        threads: How many threads torch computes with on the CPU.
    """

    keras_state: dict[str, Any]
    trial: Any
    gradients: bool
    inference: bool
    autocast: tuple[tuple[str, torch.dtype], ...]
    threads: int

    @classmethod
    def of_this_thread(cls) -> ThreadSettings:
        """Returns the settings of the calling thread."""
        return cls(
            keras_state=keras_compat.copy_thread_state(),
            trial=keras_compat.trial(),
            gradients=torch.is_grad_enabled(),
            inference=torch.is_inference_mode_enabled(),
            autocast=tuple(
                (kind, torch.get_autocast_dtype(kind))
                for kind in ("cpu", "cuda")
                if torch.is_autocast_enabled(kind)
            ),
            threads=torch.get_num_threads(),
        )

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Applies the settings to the current thread, which belongs to a replica."""
        keras_compat.paste_thread_state(self.keras_state)
        if torch.get_num_threads() != self.threads:
            torch.set_num_threads(self.threads)
        is_default = self.gradients and not self.inference and not self.autocast
        if is_default and self.trial is None:
            yield
            return
        with ExitStack() as stack:
            stack.enter_context(keras_compat.in_trial(self.trial))
            stack.enter_context(torch.set_grad_enabled(self.gradients))
            if self.inference:
                stack.enter_context(torch.inference_mode())
            for kind, dtype in self.autocast:
                stack.enter_context(torch.autocast(kind, dtype))
            yield
