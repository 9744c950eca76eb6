"""`kerasdist.function` and `kerasdist.value_and_grad` on PyTorch."""

from __future__ import annotations

import functools
import threading
import types
from collections.abc import Callable, Sequence
from typing import Any, final

import torch

from kerasdist import context, keras_seam
from kerasdist.backends.torch.reads import ReadRecorder
from kerasdist.job.current import FUNCTION, explaining
from kerasdist.structures import map_leaves
from kerasdist.user_warnings import warn_user

_UNCOMPILED = (
    "jit_compile=True has no effect on what runs on several replicas in one process on PyTorch: "
    "torch.compile cannot trace through the meetings of replicas. The function runs uncompiled; "
    "its numbers are the same."
)


@final
class Step:
    """A step of a custom loop.

    Other backends trace it, so what it does beside its computation counts for nothing there. That
    allows replicas on the CPU to run at the same time (see `kerasdist.backends.torch.pace`).
    """

    def __init__(self, function: Callable[..., Any], jit_compile: bool) -> None:
        """Makes it; compiling waits for the first call.

        Args:
            function: The user's function.
            jit_compile: Whether to compile it with ``torch.compile``, where there is one replica.
        """
        functools.update_wrapper(self, function)
        self._function = function
        self._compiled = torch.compile(function) if jit_compile else None
        self._warned = False

    def __get__(self, owner: Any, kind: Any = None) -> Callable[..., Any]:
        """Returns the method of an object, where a step is a method.

        Args:
            owner: The object, None for its class.
            kind: The class.
        """
        return self if owner is None else types.MethodType(self, owner)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Takes the step, compiled where there is one replica.

        Args:
            *args: The function's arguments.
            **kwargs: The function's arguments.
        """
        function = self._function
        if self._compiled is not None:
            if context.get_strategy().num_replicas_in_sync > 1:
                self.warn_if_compiled()
            else:
                function = self._compiled
        _inside.steps.append(self)
        try:
            with explaining(FUNCTION):
                return function(*args, **kwargs)
        finally:
            _inside.steps.pop()

    def warn_if_compiled(self) -> None:
        """Warns, once, that what runs on several replicas is not compiled."""
        if self._compiled is not None and not self._warned:
            self._warned = True
            warn_user(_UNCOMPILED)


@final
class _Inside(threading.local):
    """Which steps the calling thread is inside of."""

    def __init__(self) -> None:
        self.steps: list[Step] = []


_inside = _Inside()


def current_step() -> Step | None:
    """Returns the step that calls, None outside of all."""
    return _inside.steps[-1] if _inside.steps else None


def value_and_grad(
    fn: Callable[[], Any], variables: Sequence[Any], has_aux: bool
) -> tuple[Any, list[Any]]:
    """Calls a function and differentiates its value by variables (see `Backend.value_and_grad`).

    In a replica these are the replica's own gradients, by what it sees of the variables.

    Args:
        fn: Takes nothing; returns a scalar, or with `has_aux` a pair of it and anything.
        variables: Keras variables.
        has_aux: Whether the function returns a pair.

    Raises:
        ValueError: If the value is no scalar.
    """
    with torch.enable_grad(), ReadRecorder(variables) as recorder:
        result = fn()
        value, _ = result if has_aux else (result, None)
        if not isinstance(value, torch.Tensor):
            value = keras_seam.ops.convert_to_tensor(value)
        if value.ndim > 0:
            raise ValueError(
                "Expected fn to return a scalar. "
                f"Received: a value of shape {tuple(value.shape)}. Reduce it, with "
                "keras.ops.mean or keras.ops.sum."
            )
        targets = [recorder.target(variable) for variable in variables]
        gradients = _gradients(value, targets, keep_graph=recorder.is_nested)
    if not recorder.is_nested:
        # What differentiated it has freed the graph behind it.
        result = map_leaves(_detached, result)
    return result, [
        torch.zeros_like(target, requires_grad=False)
        if gradient is None and recorder.was_read(variable)
        else gradient
        for variable, target, gradient in zip(variables, targets, gradients, strict=True)
    ]


def _gradients(
    value: torch.Tensor, targets: Sequence[torch.Tensor], *, keep_graph: bool
) -> list[torch.Tensor | None]:
    wanted = [target for target in targets if target.requires_grad]
    if not value.requires_grad or not wanted:
        return [None] * len(targets)
    found = iter(torch.autograd.grad(value, wanted, create_graph=keep_graph, allow_unused=True))
    return [next(found) if target.requires_grad else None for target in targets]


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf
