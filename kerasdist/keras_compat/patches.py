"""The table of everything that is patched in Keras, and the code that applies the patches.

A row of the table names the functions that run in place of one function of Keras. The first
argument of each function is the next function of the row, or Keras's own function for the last
function of the row. Its other arguments are those of the call. For a model without a strategy, and
for code outside of replicas, a function only calls its first argument, so plain Keras code runs.

If a row names a method that a class in `BASES` only inherits, nothing of Keras is replaced. Instead
the class gets one more base class, before the base classes that Keras gave it. The functions are
methods of the added base class. If a user's subclass overrides such a method, the override is still
called first, and its ``super()`` call reaches the added base class.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, final

import keras

from kerasdist.core.internals import Internal, place_at, undecorated
from kerasdist.keras_compat import internals
from kerasdist.keras_compat.models import backend_name, is_builtin

Function = Callable[..., Any]


@final
@dataclass(frozen=True)
class Method:
    """A replacement that is built from Keras's function once, which saves a call in each step.

    Attributes:
        make: A function that builds the replacement from the original.
    """

    make: Callable[[Function], Function]


@final
@dataclass(frozen=True)
class Patch:
    """A row of the table.

    Attributes:
        functions: The names of the functions that run in place of the target, the outermost first.
        target: The target that the functions replace: a public ``"module:Class.name"``, or an
            internal.
        reason: The purpose of the patch.
        backends: The backends on which the patch is applied; empty for all backends.
        stands_for: If this is an internal, the patch is applied only if Keras lacks this internal.
    """

    functions: tuple[str, ...]
    target: str | Internal
    reason: str
    backends: tuple[str, ...] = ()
    stands_for: Internal | None = None

    @property
    def path(self) -> str | None:
        """The path of the target in this version; None if it is missing."""
        return self.target if isinstance(self.target, str) else self.target.path


def _of(
    owner: str, names: str, reason: str, functions: str | None = None, on: tuple[str, ...] = ()
) -> list[Patch]:
    """Returns a row for each public method in `names`, which are separated by spaces.

    Without `functions`, the function that runs in place of a method has the method's name.
    """
    return [
        Patch(tuple((functions or name).split()), f"{owner}.{name}", reason, on)
        for name in names.split()
    ]


def _at(target: Internal, functions: str, reason: str) -> Patch:
    return Patch(tuple(functions.split()), target, reason, target.backends)


_MODEL, _LAYER, _OPTIMIZER = "keras:Model", "keras:Layer", "keras:Optimizer"
_VARIABLE = "keras:Variable"
_LOSS_SCALE = "keras.optimizers:LossScaleOptimizer"
_NORMALIZATION = "keras.layers:BatchNormalization"
_TORCH_MODULE = "keras.layers:TorchModuleWrapper"
_LOSS = "keras.losses:CosineSimilarity"
_TORCH, _BY_REPLICA = ("torch",), ("tensorflow", "torch")

INHERITED = (f"{_MODEL}.compile", f"{_LOSS}.call")
"""Methods that the class in the path inherits. They are replaced in the class that defines them."""

BASES = (_MODEL, _LAYER, _OPTIMIZER, _VARIABLE)
"""The public classes of Keras to whose ``__bases__`` kerasdist may add a base class."""

PATCHES: tuple[Patch, ...] = (
    # Metrics, and the losses of layers.
    *_of("keras:Metric", "__init__", "results count all replicas", "metric_created"),
    *_of(_LAYER, "add_loss losses", "keeps losses by replica"),
    _at(internals.CLEAR_LOSSES, "clear_losses", "clears the replica's losses"),
    # Files, which only the chief of a job writes.
    _at(internals.SAVE_MODEL, "save", "only the chief writes the file"),
    _at(internals.SAVE_WEIGHTS, "save", "only the chief writes the file"),
    _at(internals.SAVE_HDF5, "save", "only the chief writes the file"),
    *_of(_MODEL, "export", "only the chief writes the files"),
    # Loading files into sharded models: all shapes are compared before any weight changes.
    *_of(_MODEL, "load_weights", "compares all shapes first"),
    _at(internals.READ_WEIGHT, "read_weight", "a comparison reads shapes alone"),
    # Losses and normalization.
    *_of(_LOSS, "call", "losses that mix examples see all rows", "call_loss", _BY_REPLICA),
    Patch(("reduce_loss",), internals.REDUCE_WEIGHTED_VALUES, "a mean counts the global batch"),
    _at(internals.SCALE_LOSS, "scale_loss scale_outside", "divides a loss in custom loops"),
    _at(internals.UNSCALE_LOSS, "unscale_loss scale_outside", "undoes the division"),
    _at(internals.SCALE_LOSS_IN_FIT, "scale_loss scale_outside", "divides in custom loops alone"),
    _at(internals.UNSCALE_LOSS_IN_FIT, "unscale_loss scale_outside", "undoes the division"),
    _at(internals.APPLY_MASK, "apply_mask", "counts a mask over the global batch"),
    *_of(_NORMALIZATION, "__init__", "allows synchronized=True", "batch_norm_created"),
    *_of(_NORMALIZATION, "call", "adopts statistics made outside of a scope", "batch_norm_called"),
    _at(internals.BATCH_MOMENTS, "moments_of_mesh batch_moments", "statistics of all rows"),
    _at(internals.NN_BATCH_NORMALIZATION, "nn_normalization", "normalizes by fused kernels"),
    # LossScaleOptimizer overrides these methods, so a patch of keras.Optimizer does not reach them.
    *_of(_LOSS_SCALE, "apply", "sums gradients over replicas", "apply apply_outside apply_scaled"),
    *_of(_LOSS_SCALE, "scale_loss", "applies the replica's weight", "scale_by_optimizer"),
    _at(internals.LAY_OUT_OUTPUT, "lay_out_output", "keeps the mask of a layer's output"),
    # Random numbers: each replica draws its own numbers; after `set_draws("global")`, it gets its
    # rows of one draw for the global batch. On TensorFlow, a step that is compared with one device
    # repeats that device's draws.
    *_of("keras.random:SeedGenerator", "next", "gives each replica draws of its own", "draw_seed"),
    _at(internals.RANDOM, "draw draw_rows dropout", "each replica draws for its rows of the batch"),
    # On PyTorch, code of the backward pass and torch's own modules must find their replica.
    _at(internals.REMAT, "remat", "recomputes in the same replica"),
    _at(internals.CUSTOM_GRADIENT, "custom_gradient", "the gradient runs in its replica"),
    *_of(_TORCH_MODULE, "parameters", "the replica's parameters", "module_parameters", _TORCH),
    *_of(_TORCH_MODULE, "call", "calls the replica's module", "module_call", _TORCH),
    # Keras compares a model's `compile` with the `compile` of Keras's trainer class. If they
    # differ, Keras takes the model's `compile` for a user's own. So `compile` is replaced in the
    # trainer class itself.
    *_of(_MODEL, "compile", "optimizer and metrics belong to the model's strategy"),
    # Methods that a model gets from an extra base class.
    *_of(_MODEL, "__new__", "a model remembers the strategy of its scope", "model_created"),
    *_of(_MODEL, "fit", "reads data by the strategy's adapter"),
    *_of(_MODEL, "evaluate predict", "reads data by the strategy's adapter", "evaluate"),
    *_of(_MODEL, "train_on_batch test_on_batch", "divides the batch among replicas", "on_batch"),
    *_of(_MODEL, "predict_on_batch compute_loss", "computes for all replicas"),
    *_of(_MODEL, "get_metrics_result", "counts all replicas", "get_metrics_result alone_result"),
    *_of(_MODEL, "make_train_function make_test_function make_predict_function", "on replicas"),
    *_of(_MODEL, "__call__ stateless_call", "takes the rows in passes; compiles on PyTorch"),
    *_of(_MODEL, "__setattr__", "JAX: leaves the state of steps untracked", "set_attribute"),
    *_of(_MODEL, "zero_grad", "clears the replica's gradients", on=_TORCH),
    _at(internals.SYMBOLIC_BUILD, "build_symbolically", "makes variables of the strategy"),
    _at(internals.BUILD_BEFORE_FIT, "build_symbolically", "makes variables of the strategy"),
    _at(internals.MAYBE_SYMBOLIC_BUILD, "build_if_needed", "takes no batch from the data"),
    _at(internals.GET_JAX_STATE, "take_state", "puts state on the devices of the replicas"),
    _at(internals.RESULT_OR_LOGS, "end_epoch", "computes the logs that steps left out"),
    _at(internals.INITIALIZE_DDP, "initialize_ddp", "leaves a job's process group alone"),
    # Methods that an optimizer gets from an extra base class.
    *_of(_OPTIMIZER, "apply", "sums gradients over replicas", "apply apply_outside"),
    *_of(_OPTIMIZER, "scale_loss", "for LossScaleOptimizer alone", "scale_by_optimizer"),
    *_of(_OPTIMIZER, "build", "TensorFlow: mirrors variables from outside"),
    *_of(_OPTIMIZER, "add_variable_from_reference", "records whose slot it is", "slot"),
    *_of(_OPTIMIZER, "stateless_apply", "JAX: updates shards"),
    _at(internals.APPLY_GRADIENTS, "update", "updates shards"),
    _at(internals.CLIP_GRADIENTS, "clip", "norms include all shards"),
    _at(internals.UPDATE_AT_ONCE, "update_in_groups", "a group at a time needs less memory"),
    # Methods that a layer gets from an extra base class.
    *_of(_LAYER, "named_parameters", "gives the replica's parameters", on=_TORCH),
    _at(internals.TRACK_VARIABLES, "track", "registers shards as parameters"),
    _at(internals.TRACK_VARIABLE, "track", "registers shards of a layer that is built"),
    # Methods that a variable gets from an extra base class. Some versions of Keras define `assign`
    # or `__repr__` in the class itself; there the class's own method is replaced.
    *_of(
        _VARIABLE,
        "__init__",
        "belongs to a strategy; may be a slot or sharded",
        "variable_created variable_made slot_made variable_sharded",
    ),
    _at(internals.INITIALIZE, "keep_shape initialize", "draws shards only; in a plan, nothing"),
    _at(internals.INITIALIZE_LATER, "keep_shape_later", "in a plan, draws nothing"),
    *_of(_VARIABLE, "assign", "combines values; stores a shard", "assign_shape assign store"),
    # With these functions, a read of a variable's value gathers shards, and keeps JAX from donating
    # the array. On TensorFlow, a read first calls functions that kerasdist registered for reads.
    *_of(_VARIABLE, "value", "gathers shards; records reads", "read_shape read_whole read"),
    *_of(_VARIABLE, "__repr__", "gathers no shards, before Keras 3.13", "show"),
)

REFUSALS: tuple[Patch, ...] = (
    Patch(("refuse_save",), f"{_MODEL}.save", "in a job", stands_for=internals.SAVE_MODEL),
    Patch(("refuse_save",), f"{_MODEL}.save", "HDF5, in a job", stands_for=internals.SAVE_HDF5),
    Patch(
        ("refuse_save",), f"{_MODEL}.save_weights", "in a job", stands_for=internals.SAVE_WEIGHTS
    ),
)
"""Patches that refuse a call, if Keras lacks the internal without which the call would go wrong."""


# The functions of Keras that were replaced; for a property, its getter. A key consists of the id of
# the module or class that had the function, and of the function's name there.
_originals: dict[tuple[int, str], Function] = {}

# The functions that run in place of functions of Keras, by their names in the tables.
_installed: dict[str, Function | Method] = {}

# The base classes that were added to classes of Keras, by the paths of these classes.
_bases: dict[str, type] = {}
_patched: set[str] = set()


def patched() -> list[str]:
    """Returns the paths at which something in Keras was replaced in this process."""
    return sorted(_patched)


def install(**functions: Function | Method) -> None:
    """Replaces functions of Keras by the given functions.

    The keywords are the names of the functions in the tables, and each is given once per process.
    If this version of Keras lacks the target of a patch, nothing is replaced for this patch, and
    the feature that needs the target raises a `VersionError` when it is used.
    """
    _installed.update(functions)
    known, here = set[str](), backend_name()
    for patch in (*PATCHES, *REFUSALS):
        known.update(patch.functions)
        is_used = not functions.keys().isdisjoint(patch.functions)
        if not is_used or patch.path is None or here not in (patch.backends or (here,)):
            continue
        if patch.stands_for is None or patch.stands_for.is_gone():
            _put_in(patch, patch.path)
    assert functions.keys() <= known, functions.keys() - known


def _put_in(patch: Patch, path: str) -> None:
    owner, name = place_at(path)
    owner_path = path.rpartition(".")[0]
    now = inspect.getattr_static(owner, name)
    if isinstance(now, ModuleType):
        _patched.add(path)
        public = getattr(keras, name)
        for each, function in tuple(vars(now).items()):
            if hasattr(public, each) and callable(function) and not inspect.isclass(function):
                _replace(patch, now, each, function)
    elif path in INHERITED:
        _patched.add(path)
        _replace(patch, next(one for one in owner.__mro__ if name in vars(one)), name, now)
    elif owner_path in BASES and (name == "__new__" or not _is_defined(owner, name)):
        # Keras's `Model.__new__` need not be replaced, because it calls the `__new__` of the next
        # class, which is the added base class.
        _patched.add(f"{owner_path}.__bases__")
        base = _base_of(owner_path, owner)
        rest = owner.__mro__[owner.__mro__.index(base) + 1 :]
        _replace(patch, base, name, next(vars(one)[name] for one in rest if name in vars(one)))
    else:
        _patched.add(path)
        _replace(patch, owner, name, now)


def _is_defined(owner: Any, name: str) -> bool:
    """Returns whether Keras defines a method in a class itself, and not in a base class.

    A method that another library has set on the class does not count.
    """
    own = undecorated(vars(owner).get(name))
    return (id(owner), name) in _originals or is_builtin(own)


def _base_of(path: str, owner: Any) -> type:
    """Returns the base class that kerasdist adds to `owner`; the first call makes and adds it."""
    base = _bases.get(path)
    if base is None:
        about = f"What kerasdist adds to `{path.replace(':', '.')}`, for models of a strategy."
        base = _bases[path] = type(f"Replicated{owner.__name__}", (), {"__doc__": about})
        owner.__bases__ = (base, *owner.__bases__)
    return base


def _replace(patch: Patch, owner: Any, name: str, now: Any) -> None:
    """Replaces an attribute of a class or module by the functions of a patch.

    Functions that are not installed yet are left out. `now` is the present attribute, which the
    owner may have inherited.
    """
    original = call = _originals.setdefault((id(owner), name), undecorated(now))
    listed = [_installed[one] for one in patch.functions if one in _installed]
    for function in reversed(listed):
        made = isinstance(function, Method)
        call = function.make(call) if made else functools.partial(function, call)
        if not isinstance(now, property) or function is not listed[0]:
            call = _as_function(call, original)
    if isinstance(now, property):
        setattr(owner, name, property(call, doc=original.__doc__))
    else:
        setattr(owner, name, staticmethod(call) if isinstance(now, staticmethod) else call)


def _as_function(call: Function, original: Function) -> Function:
    """Returns a callable as a plain function, because torch's compiler needs a function's name."""
    if isinstance(call, functools.partial):
        partial = call

        def hooked(*args: object, **kwargs: object) -> Any:
            return partial(*args, **kwargs)

        call = hooked
    call = functools.update_wrapper(call, original)
    # Keras reads the signature of a layer's `__init__` without following `__wrapped__`, so the
    # signature is set. It is not set for `build`: Keras copies the attributes of `build` to a
    # function without `self`.
    if original.__name__ != "build":
        call.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
    return call
