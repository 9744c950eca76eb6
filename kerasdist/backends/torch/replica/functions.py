"""`kerasdist.function` and `kerasdist.value_and_grad` on PyTorch."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, final

import keras
import torch

from kerasdist.backends.torch.state.reads import ReadRecorder
from kerasdist.core import context
from kerasdist.core.structures import map_leaves
from kerasdist.core.user_warnings import warn_once
from kerasdist.job.job import FUNCTION, translating_failures

_UNCOMPILED = (
    "jit_compile=True has no effect on what runs on several replicas in one process on PyTorch: "
    "torch.compile cannot trace the points where replicas wait for each other. The function runs "
    "uncompiled; its numbers are the same."
)


@final
class Step:
    """A user's function as a step of a custom loop. With only one replica it can be compiled."""

    def __init__(self, function: Callable[..., Any], jit_compile: bool) -> None:
        """Wraps the function; with `jit_compile`, torch compiles it at the first call."""
        functools.update_wrapper(self, function)
        self._function = function
        self._compiled = torch.compile(function) if jit_compile else None

    def __get__(self, owner: Any, kind: Any = None) -> Callable[..., Any]:
        """Binds the step to an object, as Python does with a function in a class."""
        return self if owner is None else types.MethodType(self, owner)

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Runs the step, in compiled form if there is one replica."""
        function = self._function
        if self._compiled is not None:
            if context.strategy_in_force().num_replicas_in_sync > 1:
                self.warn_if_compiled()
            else:
                function = self._compiled
        outer = running_step.set(self)
        try:
            with translating_failures(FUNCTION):
                return function(*args, **kwargs)
        finally:
            running_step.reset(outer)

    def warn_if_compiled(self) -> None:
        """If the user asked to compile, warns once that several replicas run uncompiled code."""
        if self._compiled is not None:
            warn_once(self, _UNCOMPILED)


running_step: ContextVar[Step | None] = ContextVar("the step that runs", default=None)
"""The step that the calling thread is running; None outside of steps."""


def value_and_grad(
    function: Callable[[], tuple[torch.Tensor, Any]], variables: Sequence[keras.Variable]
) -> tuple[tuple[torch.Tensor, Any], list[Any]]:
    """Returns a function's result and its gradients (see `Backend.value_and_grad`).

    In a replica, these are the gradients of that replica only, not sums over the replicas.
    """
    with torch.enable_grad(), ReadRecorder(variables) as recorder:
        result = function()
        targets = [recorder.target(variable) for variable in variables]
        gradients = _gradients(result[0], targets, keep_graph=recorder.is_nested)
    if not recorder.is_nested:
        # The result is detached from its graph, because the backward pass has freed the graph.
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


def _detached(leaf: object) -> Any:
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf
