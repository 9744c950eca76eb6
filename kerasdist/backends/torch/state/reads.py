"""Records which variables a function reads, and the tensors that the reads return."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import keras
import torch

from kerasdist import keras_compat
from kerasdist.backends.torch.state import shards
from kerasdist.backends.torch.state.variables import ReplicaScope
from kerasdist.errors import ScopeError


@final
class ReadRecorder(keras_compat.InnerScope):
    """Records which variables are read, and leaves reads and writes to the enclosing scope.

    Autograd returns None as the gradient of every variable that does not affect the result. But
    `value_and_grad` returns None only for a variable that was not read. For a variable that was
    read, but does not affect the result, it returns zeros.
    """

    def __init__(self, variables: Sequence[keras.Variable]) -> None:
        super().__init__(initialize_variables=False)
        self._watched = {id(variable) for variable in variables}
        self._read: dict[int, torch.Tensor] = {}

    def __enter__(self) -> ReadRecorder:
        super().__enter__()
        outer = self.original_scope
        # The losses that layers add are collected in the outer scope, if that scope collects
        # losses.
        self.collect_losses = outer is None or outer.collect_losses
        if outer is not None:
            self.losses = outer.losses
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        if self.original_scope is None:
            keras_compat.initialize_waiting_variables()

    @property
    def is_nested(self) -> bool:
        """Whether this recorder is inside of another recorder, as for a second derivative."""
        outer = self.original_scope
        while outer is not None and not isinstance(outer, ReadRecorder):
            outer = outer.original_scope
        return outer is not None

    def get_current_value(self, variable: keras.Variable) -> torch.Tensor:
        """Returns the variable's value in the enclosing scope, and records that it was read."""
        key = id(variable)
        if key not in self._watched:
            return self._outer_value(variable)
        value = self._differentiable(variable)
        self._read.setdefault(key, value)
        return value

    def was_read(self, variable: keras.Variable) -> bool:
        """Returns whether a variable was read."""
        return id(variable) in self._read

    def target(self, variable: keras.Variable) -> torch.Tensor:
        """Returns the tensor for which autograd is to compute the variable's gradient.

        This is usually the tensor that a read of the variable has returned.
        """
        scope = self.original_scope
        while isinstance(scope, ReadRecorder):
            scope = scope.original_scope
        if isinstance(scope, ReplicaScope) and shards.shard_of(variable) is not None:
            leaf = scope.leaf(variable)  # each read has returned another view of this leaf
            if leaf.requires_grad:
                return leaf
        read = self._read.get(id(variable))
        # A variable without a recorded read may have been read by one of torch's own modules, which
        # read their parameters directly.
        return self._outer_value(variable) if read is None else read

    def _outer_value(self, variable: keras.Variable) -> torch.Tensor:
        value = None
        if self.original_scope is not None:
            value = self.original_scope.get_current_value(variable)
        if value is not None:
            return value
        keras_compat.initialize_waiting_variable(variable)
        known = self._read.get(id(variable))
        if known is not None and shards.shard_of(variable) is not None:
            return known  # another read would gather the weight again
        return shards.read(variable)

    def _differentiable(self, variable: keras.Variable) -> torch.Tensor:
        value = self._outer_value(variable)
        if value.requires_grad or not (value.is_floating_point() or value.is_complex()):
            return value
        known = self._read.get(id(variable))
        # To get a gradient, a variable that is not trainable is read as a leaf that shares the
        # variable's memory. All reads return the same leaf.
        if known is not None and known.data_ptr() == value.data_ptr():
            return known
        return value.detach().requires_grad_(True)


def require_outside(scope: keras.StatelessScope | None) -> None:
    """Refuses `strategy.run` in a function that `value_and_grad` differentiates."""
    if isinstance(scope, ReadRecorder):
        raise ScopeError(
            "Expected value_and_grad in the function that strategy.run runs. Received: "
            "strategy.run in the function that value_and_grad differentiates. Let each replica "
            "differentiate its own loss; optimizer.apply sums the gradients."
        )
