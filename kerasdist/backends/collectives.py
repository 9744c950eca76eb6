"""The part of the waist that replicas' code needs: what one can ask of the others."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from kerasdist.collectives import CommunicationOptions

if TYPE_CHECKING:
    from kerasdist.strategy import Strategy

# Keras's ``optimizer.apply``: of the optimizer, gradients, and variables or None.
Apply = Callable[[Any, list[Any], "list[Any] | None"], Any]

DEFAULT_COMMUNICATION = CommunicationOptions()


class Collectives(abc.ABC):
    """What the code of one replica can ask of the others. All replicas must call the same.

    Attributes:
        weighs_scaled_losses: Whether a loss that a LossScaleOptimizer scales gets the replica's
            weight before that, so that `apply_gradients` does not weigh its gradients again.
    """

    weighs_scaled_losses = False

    def weighs_loss_of(self, optimizer: Any, *, is_scaled: bool) -> bool:
        """Returns whether a loss gets the replica's weight before it is differentiated.

        If so, `apply_gradients` does not weigh its gradients again.

        Args:
            optimizer: The optimizer for which it is.
            is_scaled: Whether that is a LossScaleOptimizer.
        """
        del optimizer
        return is_scaled and self.weighs_scaled_losses

    def differentiated_loss(self, optimizer: Any, loss: Any, *, is_weighed: bool) -> Any:
        """Returns a loss as the backward pass is to begin with it.

        Args:
            optimizer: The optimizer for which it is.
            loss: The loss, scaled.
            is_weighed: Whether it has got the replica's weight.
        """
        del optimizer, is_weighed
        return loss

    @abc.abstractmethod
    def merge_call(
        self,
        strategy: Strategy,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Calls a function once, in cross-replica context, with all replicas' arguments.

        All replicas must call it.

        Args:
            strategy: The strategy, the function's first argument.
            function: What to call.
            args: This replica's arguments; the function gets distributed values of them.
            kwargs: Keyword arguments, likewise.

        Returns:
            What the function returned, of distributed values this replica's component.
        """

    def scaled_loss(self, value: Any, replicas: int, original: Callable[[Any], Any]) -> Any:
        """Returns a mean loss as custom loops want it: divided by the number of replicas.

        Args:
            value: The loss.
            replicas: How many replicas there are.
            original: What Keras does here, which is this very thing on TensorFlow and nothing else.
        """
        del original
        return value / replicas

    def unscaled_loss(self, value: Any, replicas: int, original: Callable[[Any], Any]) -> Any:
        """Returns what `scaled_loss` was made of.

        Args:
            value: The scaled loss.
            replicas: How many replicas there are.
            original: What Keras does here.
        """
        del original
        return value * replicas

    def assign(self, variable: Any, value: Any, write: Callable[[Any, Any], Any]) -> Any:
        """Assigns to a Keras variable in replica code, where nothing else catches the write.

        Args:
            variable: The variable.
            value: A tensor of its type.
            write: Keras's own assignment, of a variable and a value.
        """
        return write(variable, value)

    def equal_writes(self) -> AbstractContextManager[None]:
        """Returns a context in which what is assigned is equal on all replicas by itself."""
        return nullcontext()

    @abc.abstractmethod
    def all_sum(
        self, tensors: Sequence[Any], options: CommunicationOptions = DEFAULT_COMMUNICATION
    ) -> list[Any]:
        """Returns each tensor summed over the replicas, with its gradient.

        The gradient is an all-sum again; where the one-device contract holds, one that counts each
        replica by its share of the batch (docs/numerics.md). All replicas must call it, with as
        many tensors of the same shapes and types.

        Args:
            tensors: Tensors of this replica.
            options: How to communicate.
        """

    @abc.abstractmethod
    def mean_of_sum(self, total: Any, replicas: int) -> Any:
        """Returns a sum over the replicas, divided by their number, in the sum's type.

        Args:
            total: What `all_sum` returned.
            replicas: How many replicas there are.
        """

    @abc.abstractmethod
    def all_gather(self, tensor: Any, axis: int = 0) -> Any:
        """Returns the replicas' tensors, one after another along an axis, with their gradient.

        All replicas must call it; the sizes along the axis may differ, all else is equal.

        Args:
            tensor: A tensor of this replica, of at least one dimension.
            axis: The axis, from 0.
        """

    def all_stack(self, tensor: Any) -> Any:
        """Returns the replicas' tensors stacked along a new first axis, with their gradient.

        All replicas must call it. As the shapes are equal, nobody has to ask for them first.

        Args:
            tensor: A tensor of this replica, of the same shape in all of them.
        """
        return self.all_gather(tensor[None])

    def own_moments(self, inputs: Any, axes: Sequence[int]) -> tuple[Any, Any] | None:
        """Returns mean and variance of the replica's own rows; None if Keras's operations do best.

        Args:
            inputs: Float tensor with at least one row.
            axes: The axes to average over.

        Returns:
            Two tensors with a value a channel, or None.
        """
        del inputs, axes
        return None

    @abc.abstractmethod
    def apply_gradients(
        self,
        apply: Apply,
        optimizer: Any,
        gradients: list[Any],
        variables: list[Any] | None,
    ) -> Any:
        """Sums gradients over the replicas, then updates the variables once, everywhere.

        Where the one-device contract holds, each replica's gradients are weighted by its share of
        the batch first. All replicas must call it.

        Args:
            apply: Keras's own ``apply``, of an optimizer, gradients and variables.
            optimizer: A Keras optimizer.
            gradients: This replica's gradients; None where there is none.
            variables: The variables they belong to, or None for all that the optimizer knows.
        """
