"""The functions and classes of PyTorch that are not public and that kerasdist needs."""

from __future__ import annotations

from kerasdist.core.internals import EVERY_VERSION, Internal

_HERE = ("torch",)
_COMPARING = "comparing a training step with one device's on PyTorch"
_UNCOMPARED = "refused; `fit` goes on without comparing its first step"
_BY_LAYOUT_MAP = "a keras.distribution.LayoutMap on PyTorch"
_NORMALIZING = "BatchNormalization by torch's kernels on GPUs"
_BY_KERAS = "Keras's own operations, which are slower"
_ONE_BY_ONE = "the same numbers, by a kernel for each tensor: slower on GPUs"

MULTIPLY_EACH = Internal(
    {"torch:_foreach_mul": EVERY_VERSION},
    feature="weighting gradients by few kernels",
    without=_ONE_BY_ONE,
    backends=_HERE,
)
ADD_TO_EACH = Internal(
    {"torch:_foreach_add_": EVERY_VERSION},
    feature="summing gradients by few kernels",
    without=_ONE_BY_ONE,
    backends=_HERE,
)
COPY_TO_EACH = Internal(
    {"torch:_foreach_copy_": EVERY_VERSION},
    feature="writing variables by few kernels",
    without=_ONE_BY_ONE,
    backends=_HERE,
)

COUNT_OF_CHANGES = Internal(
    {"torch:Tensor._version": EVERY_VERSION},
    feature=(
        "knowing that a tensor was changed: for several GPUs in one process, variables that "
        'differ by replica in custom loops, sharding="full", set_most_examples_at_once, and layers '
        "that register buffers, on PyTorch"
    ),
    without="refused",
    backends=_HERE,
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
    without="refused",
    backends=_HERE,
)

BATCH_NORM = Internal(
    {"torch.nn.modules.batchnorm:_BatchNorm": EVERY_VERSION},
    feature="finding batch normalizations in modules of torch",
    without="those are found that derive from torch.nn's public classes",
    backends=_HERE,
)
NORMALIZE_ROWS = Internal(
    {"torch:batch_norm_elemt": EVERY_VERSION},
    feature=_NORMALIZING,
    without=_BY_KERAS,
    backends=_HERE,
)
REDUCE_NORMALIZED = Internal(
    {"torch:batch_norm_backward_reduce": EVERY_VERSION},
    feature=_NORMALIZING,
    without=_BY_KERAS,
    backends=_HERE,
)
ARE_TRANSFORMS_ACTIVE = Internal(
    {"torch._C:_are_functorch_transforms_active": EVERY_VERSION},
    feature=_NORMALIZING,
    without=_BY_KERAS,
    backends=_HERE,
)

COMPILER_ERROR = Internal(
    {"torch._dynamo.exc:TorchDynamoException": EVERY_VERSION},
    feature="running a model uncompiled, on PyTorch, that jit_compile=True cannot compile",
    without="its `fit` ends with torch's error",
    backends=_HERE,
)

DISPATCH_MODE = Internal(
    {"torch.utils._python_dispatch:TorchDispatchMode": EVERY_VERSION},
    feature=f"{_COMPARING}, and {_BY_LAYOUT_MAP}",
    without=f"{_UNCOMPARED}; a LayoutMap is refused",
    backends=_HERE,
)
OPERATION_SCHEMA = Internal(
    {"torch._ops:OpOverload._schema": EVERY_VERSION},
    feature=_BY_LAYOUT_MAP,
    without="refused",
    backends=_HERE,
)
LIST_SIGNATURES = Internal(
    {"torch.fx.operator_schemas:get_signature_for_torch_op": EVERY_VERSION},
    feature=_COMPARING,
    without=_UNCOMPARED,
    backends=_HERE,
)

_CALLERS = "modes that the code around `fit` is in, in all replicas of a process, on PyTorch"
_OF_FIRST = "they hold in the first replica alone"

FUNCTION_MODES = Internal(
    {"torch.overrides:_get_current_function_mode_stack": EVERY_VERSION},
    feature=f"`torch.device(...)` and other function {_CALLERS}",
    without=_OF_FIRST,
    backends=_HERE,
)
DISPATCH_MODES = Internal(
    {"torch.utils._python_dispatch:_get_current_dispatch_mode_stack": EVERY_VERSION},
    feature=f"dispatch {_CALLERS}",
    without=_OF_FIRST,
    backends=_HERE,
)
SAVED_TENSORS_HOOKS = Internal(
    {"torch._C._autograd:_top_saved_tensors_default_hooks": EVERY_VERSION},
    feature="hooks on saved tensors of the code around `fit`, in all replicas, on PyTorch",
    without=_OF_FIRST,
    backends=_HERE,
)
