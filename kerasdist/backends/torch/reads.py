"""Which variables a function reads, and as which tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import keras
import torch

from kerasdist import keras_seam
from kerasdist.errors import ScopeError


@final
class ReadRecorder(keras.StatelessScope):
    """Notes which variables are read, and leaves all else to the scope around it.

    Autograd knows only what has an influence; a variable that is read without any has zeros for a
    gradient, one that is not read has none.
    """

    def __init__(self, variables: Sequence[Any]) -> None:
        """Makes the recorder.

        Args:
            variables: The Keras variables to watch.
        """
        super().__init__(initialize_variables=False)
        self._watched = {id(variable) for variable in variables}
        self._read: dict[int, torch.Tensor] = {}

    def __enter__(self) -> ReadRecorder:
        super().__enter__()
        outer = self.original_scope
        # As if there were no scope: layers may add losses, or must not, if the outer one says so.
        self.collect_losses = outer is None or outer.collect_losses
        if outer is not None:
            self.losses = outer.losses
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if self.original_scope is None:
            keras_seam.initialize_waiting_variables()

    @property
    def is_nested(self) -> bool:
        """Whether the value is part of another one that is differentiated."""
        outer = self.original_scope
        while outer is not None and not isinstance(outer, ReadRecorder):
            outer = outer.original_scope
        return outer is not None

    def get_current_value(self, variable: Any) -> torch.Tensor:
        """Returns the value that the variable has around this scope, and notes that it was read.

        Args:
            variable: A Keras variable.
        """
        key = id(variable)
        if key not in self._watched:
            return self._outer_value(variable)
        value = self._differentiable(variable)
        self._read.setdefault(key, value)
        return value

    def add_update(self, update: tuple[Any, torch.Tensor]) -> None:
        """Passes on what is assigned to a variable.

        Args:
            update: The variable and its new value.
        """
        variable, value = update
        if self.original_scope is not None:
            self.original_scope.add_update(update)
            return
        with keras_seam.outside_stateless_scopes():
            variable.assign(value)

    def was_read(self, variable: Any) -> bool:
        """Returns whether a variable was read.

        Args:
            variable: One of those that are watched.
        """
        return id(variable) in self._read

    def target(self, variable: Any) -> torch.Tensor:
        """Returns the tensor that stands for a variable where something was computed from it.

        Args:
            variable: One of those that are watched.
        """
        read = self._read.get(id(variable))
        # torch's own modules hold their parameters themselves: those are not seen to be read.
        return self._outer_value(variable) if read is None else read

    def _outer_value(self, variable: Any) -> torch.Tensor:
        value = None
        if self.original_scope is not None:
            value = self.original_scope.get_current_value(variable)
        if value is not None:
            return value
        keras_seam.initialize_waiting_variable(variable)
        return keras_seam.stored_value(variable)

    def _differentiable(self, variable: Any) -> torch.Tensor:
        value = self._outer_value(variable)
        if value.requires_grad or not (value.is_floating_point() or value.is_complex()):
            return value
        known = self._read.get(id(variable))
        # A variable that is not trainable: a leaf that shares its memory, if that still fits.
        if known is not None and known.data_ptr() == value.data_ptr():
            return known
        return value.detach().requires_grad_(True)


def require_outside(scope: Any) -> None:
    """Refuses to let replicas run in a function that is differentiated.

    Args:
        scope: The stateless scope that is open, or None.

    Raises:
        ScopeError: If it is that of such a function.
    """
    if isinstance(scope, ReadRecorder):
        raise ScopeError(
            "Expected value_and_grad in the function that strategy.run runs. Received: "
            "strategy.run in the function that value_and_grad differentiates. Let each replica "
            "differentiate its own loss; optimizer.apply sums the gradients."
        )
