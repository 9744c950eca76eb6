"""The functions and classes of PyTorch that are not public and that kerasdist needs."""

from __future__ import annotations

from kerasdist.core.internals import REFUSED, Internal, internal

_COMPARING = "comparing a training step with one device's on PyTorch"
_UNCOMPARED = "refused; `fit` goes on without comparing its first step"
_BY_LAYOUT_MAP = "a keras.distribution.LayoutMap on PyTorch"
_ONE_BY_ONE = "the same numbers, by a kernel for each tensor: slower on GPUs"

MULTIPLY_EACH = internal("torch:_foreach_mul", "weighting gradients by few kernels", _ONE_BY_ONE)
ADD_TO_EACH = internal("torch:_foreach_add_", "summing gradients by few kernels", _ONE_BY_ONE)
COPY_TO_EACH = internal("torch:_foreach_copy_", "writing variables by few kernels", _ONE_BY_ONE)

COUNT_OF_CHANGES = internal(
    "torch:Tensor._version",
    "knowing that a tensor was changed: for several GPUs in one process, variables that "
    'differ by replica in custom loops, sharding="full", set_most_examples_at_once, and layers '
    "that register buffers, on PyTorch",
)

CALL_AFTER_BACKWARD = Internal(
    {
        "torch.autograd.graph:queue_callback": "2.15",
        "torch.autograd:Variable._execution_engine.queue_callback": "2.9 to 2.14",
    },
    feature=(
        "the end of a backward pass: with a LossScaleOptimizer, as mixed_float16 has, and with "
        'sharding="full", on PyTorch'
    ),
    without=REFUSED,
)

ARE_TRANSFORMS_ACTIVE = internal(
    "torch._C:_are_functorch_transforms_active",
    "BatchNormalization with gradients of its own, which transforms of torch.func cannot take",
    "Keras's own operations, which are slower",
)

COMPILER_ERROR = internal(
    "torch._dynamo.exc:TorchDynamoException",
    "running a model uncompiled, on PyTorch, that jit_compile=True cannot compile",
    "its `fit` ends with torch's error",
)

DISPATCH_MODE = internal(
    "torch.utils._python_dispatch:TorchDispatchMode",
    f"{_COMPARING}, and {_BY_LAYOUT_MAP}",
    f"{_UNCOMPARED}; a LayoutMap is refused",
)
OPERATION_SCHEMA = internal("torch._ops:OpOverload._schema", _BY_LAYOUT_MAP)

_CALLERS = "modes that the code around `fit` is in, in all replicas of a process, on PyTorch"
_OF_FIRST = "they hold in the first replica alone"

FUNCTION_MODES = internal(
    "torch.overrides:_get_current_function_mode_stack",
    f"`torch.device(...)` and other function {_CALLERS}",
    _OF_FIRST,
)
DISPATCH_MODES = internal(
    "torch.utils._python_dispatch:_get_current_dispatch_mode_stack",
    f"dispatch {_CALLERS}",
    _OF_FIRST,
)
SAVED_TENSORS_HOOKS = internal(
    "torch._C._autograd:_top_saved_tensors_default_hooks",
    "hooks on saved tensors of the code around `fit`, in all replicas, on PyTorch",
    _OF_FIRST,
)
