"""The functions and classes of PyTorch that kerasdist uses although they are not public."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from kerasdist.core.internals import REFUSED, Internal, internal

_COMPARING = "comparing a training step with one device's on PyTorch"
_UNCOMPARED = "refused; `fit` continues without comparing its first step"
_BY_LAYOUT_MAP = "a keras.distribution.LayoutMap on PyTorch"
_at_once = partial(
    internal, without="one kernel per tensor, with the same results, which is slower on GPUs"
)


def _multiply_one_by_one(tensors: Sequence[Any], factor: float) -> list[Any]:
    return [one * factor for one in tensors]


def _add_one_by_one(tensors: Sequence[Any], others: Sequence[Any]) -> None:
    for one, other in zip(tensors, others, strict=True):
        one.add_(other)


def _copy_one_by_one(targets: Sequence[Any], sources: Sequence[Any]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


MULTIPLY_EACH = _at_once(
    "torch:_foreach_mul", "weighting gradients with few kernels", otherwise=_multiply_one_by_one
)
ADD_TO_EACH = _at_once(
    "torch:_foreach_add_", "summing gradients with few kernels", otherwise=_add_one_by_one
)
COPY_TO_EACH = _at_once(
    "torch:_foreach_copy_", "writing variables with few kernels", otherwise=_copy_one_by_one
)

COUNT_OF_CHANGES = internal(
    "torch:Tensor._version",
    "noticing that a tensor was changed in place: for several GPUs in one process, variables "
    'that differ between replicas in custom loops, sharding="full", set_most_examples_at_once, and '
    "layers that register buffers, on PyTorch",
)

CALL_AFTER_BACKWARD = Internal(
    {
        "torch.autograd.graph:queue_callback": "2.15",
        "torch.autograd:Variable._execution_engine.queue_callback": "2.9 to 2.14",
    },
    feature=(
        "calling code at the end of a backward pass, which a LossScaleOptimizer (mixed_float16) "
        'and sharding="full" need, on PyTorch'
    ),
    without=REFUSED,
)

ARE_TRANSFORMS_ACTIVE = internal(
    "torch._C:_are_functorch_transforms_active",
    "a faster BatchNormalization, used unless a transform of torch.func is active",
    "BatchNormalization uses Keras's own operations, which are slower",
    otherwise=lambda: True,
)

COMPILER_ERROR = internal(
    "torch._dynamo.exc:TorchDynamoException",
    "running a model without compilation if jit_compile=True fails, on PyTorch",
    "`fit` of such a model ends with torch's error",
    otherwise=(),
)

DISPATCH_MODE = internal(
    "torch.utils._python_dispatch:TorchDispatchMode",
    f"{_COMPARING}, and {_BY_LAYOUT_MAP}",
    f"{_UNCOMPARED}; a LayoutMap is refused",
)
OPERATION_SCHEMA = internal("torch._ops:OpOverload._schema", _BY_LAYOUT_MAP)

_CALLERS = "modes, entered around `fit`, that apply in all replicas of a process, on PyTorch"
_OF_FIRST = "the modes or hooks apply only in the first replica"

FUNCTION_MODES = internal(
    "torch.overrides:_get_current_function_mode_stack",
    f"`torch.device(...)` and other function {_CALLERS}",
    _OF_FIRST,
    otherwise=list,
)
DISPATCH_MODES = internal(
    "torch.utils._python_dispatch:_get_current_dispatch_mode_stack",
    f"dispatch {_CALLERS}",
    _OF_FIRST,
    otherwise=list,
)
SAVED_TENSORS_HOOKS = internal(
    "torch._C._autograd:_top_saved_tensors_default_hooks",
    "saved_tensors_hooks, entered around `fit`, that apply in all replicas, on PyTorch",
    _OF_FIRST,
    otherwise=lambda in_traces: None,
)
