"""Private parts of TensorFlow that scopes and compiled functions need; a test watches each."""

from __future__ import annotations

import functools
import logging
import random
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.autograph.core import config as autograph_config
from tensorflow.python.autograph.impl import api as autograph_api
from tensorflow.python.autograph.pyct import error_utils
from tensorflow.python.distribute import distribute_lib, ps_values
from tensorflow.python.distribute import values as distributed_values
from tensorflow.python.eager import context as eager_context
from tensorflow.python.eager.polymorphic_function import polymorphic_function
from tensorflow.python.ops import control_flow_util

from kerasdist.job.current import FUNCTION, explaining


class _Open(threading.local):
    """The scopes that are open in the calling thread, the outermost first."""

    def __init__(self) -> None:
        self.scopes: list[EngineScope] = []


_open = _Open()


class EngineScope(AbstractContextManager[None]):
    """``strategy.scope()`` of a ``tf.distribute`` strategy, that outlives ``clear_session``.

    TensorFlow keeps on its default graph which strategy is in force, and Keras's ``clear_session``
    throws that graph away: the scope would be left without a word, and its end would fail.
    """

    def __init__(self, engine: tf.distribute.Strategy) -> None:
        """Prepares the scope.

        Args:
            engine: The strategy.
        """
        self._engine = engine
        self._scope: Any = None

    def __enter__(self) -> None:
        _renew_scopes_after_reset()
        self.renew()
        _open.scopes.append(self)

    def __exit__(self, *error: object) -> None:
        _open.scopes.remove(self)
        self.leave(*error)

    def leave(self, *error: Any) -> None:
        """Leaves the scope; `renew` enters it again."""
        self._scope.__exit__(*(error or (None, None, None)))

    def renew(self) -> None:
        """Enters the scope on the default graph that there is now."""
        self._scope = self._engine.scope()
        self._scope.__enter__()


@contextmanager
def scopes_left() -> Iterator[None]:
    """Runs code as outside of the scopes that are open in this thread."""
    scopes, _open.scopes = _open.scopes, []
    for scope in reversed(scopes):
        scope.leave()
    try:
        yield
    finally:
        for scope in scopes:
            scope.renew()
        _open.scopes = scopes


@cache
def _renew_scopes_after_reset() -> None:
    reset = tf.compat.v1.reset_default_graph

    def reset_and_renew() -> None:
        reset()
        for scope in _open.scopes:
            scope.renew()

    tf.compat.v1.reset_default_graph = reset_and_renew


@contextmanager
def cross_replica_code_without_merge_call() -> Iterator[None]:
    """Lets code that would call ``merge_call`` run in cross-replica context.

    Keras's optimizers update variables by `tf.__internal__.distribute.interim.maybe_merge_call`,
    which fails where the replicas have met already, and in the branches of ``ops.cond`` wherever it
    is called: that is why gradient accumulation crashes under ``tf.distribute.MirroredStrategy``
    (TRAPS, 9). Where no strategy is in force it calls the update directly, and that enters its
    variables' strategy by itself.
    """
    default = distribute_lib._get_default_strategy()
    distribute_lib._push_per_thread_mode(distribute_lib._ThreadMode(default, default, None))
    try:
        yield
    finally:
        distribute_lib._pop_per_thread_mode()


def mirrored_strategy(devices: list[str], *, share_memory: bool) -> tf.distribute.MirroredStrategy:
    """Returns a ``tf.distribute`` strategy that gets along with others in the same process.

    TensorFlow gives the devices of each strategy the same key, so that a collective of a second
    strategy with other devices fails: "Device CPU:0 is joining a group with size 3, but that group
    has size 2".

    Args:
        devices: The devices' names.
        share_memory: Whether they do, so that collectives would only be slower than a sum.
    """
    engine_class = tf.distribute.MirroredStrategy
    engine_class._collective_key_base += _KEYS_OF_A_STRATEGY
    reduction = tf.distribute.ReductionToOneDevice() if share_memory else None
    return engine_class(devices, cross_device_ops=reduction)


def group_key() -> int:
    """Returns a number for collectives that are not the framework's own, of the newest strategy.

    TensorFlow counts its own groups from the strategy's base on.
    """
    return tf.distribute.MirroredStrategy._collective_key_base + _KEYS_OF_A_STRATEGY - 1


def central_storage_strategy(devices: list[str], home: str) -> Any:
    """Returns a ``tf.distribute`` strategy that keeps variables on one device.

    Args:
        devices: The names of the devices that compute.
        home: The name of the device that holds the variables.
    """
    tf.distribute.MirroredStrategy._collective_key_base += _KEYS_OF_A_STRATEGY
    return tf.distribute.experimental.CentralStorageStrategy(devices, home)


def keeps_one_copy(engine: tf.distribute.Strategy) -> bool:
    """Returns whether there is one copy of a variable, whatever the number of replicas.

    Args:
        engine: The strategy.
    """
    return isinstance(engine, tf.distribute.experimental.CentralStorageStrategy)


# More than a strategy has groups of devices; TensorFlow's own tests use the same.
_KEYS_OF_A_STRATEGY = 100_000


@cache
def let_autograph_pass_over(package: str) -> None:
    """Lets AutoGraph treat a package as it treats TensorFlow and Keras: it runs as it is written.

    The user's functions that the package calls are converted all the same, see
    `converted_as_here`. (``do_not_convert`` would leave those alone too.)

    Args:
        package: The package's name.
    """
    rule = autograph_config.DoNotConvert(package)
    autograph_config.CONVERSION_RULES = (rule, *autograph_config.CONVERSION_RULES)


def converted_as_here(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a user's function as AutoGraph converts it where this is called, if it does.

    Args:
        function: A function that ``tf.distribute`` would convert before it runs it.
    """
    here = tf.__internal__.autograph.control_status_ctx()
    return tf.__internal__.autograph.tf_convert(function, here, convert_by_default=False)


def let_errors_pass(error_class: type[Exception]) -> None:
    """Lets the errors of a class come out of compiled functions as what they are.

    AutoGraph would raise a ``StagingError`` in their place.

    Args:
        error_class: The class; its subclasses are meant too.
    """
    error_class.ag_pass_through = True  # type: ignore[attr-defined]


def error_with_own_type(error: Exception) -> Exception:
    """Returns the user's error for the one that AutoGraph raised in its place.

    AutoGraph makes the common errors anew, with a message that shows the user's lines. Those that
    it does not know it replaces by errors of its own.

    Args:
        error: What was raised while a graph was made.
    """
    stand_ins = (autograph_api.StagingError, error_utils.MultilineMessageKeyError)
    if isinstance(error, stand_ins) and isinstance(error.__context__, Exception):
        error = error.__context__
        vars(error).pop("ag_error_metadata", None)
        error.ag_pass_through = True  # type: ignore[attr-defined]
    return error


def install_tape_gradient(hook: Callable[..., Any]) -> None:
    """Puts in a hook where a gradient tape is asked for gradients.

    Args:
        hook: Gets TensorFlow's own function first, then the arguments of the call.
    """
    original = tf.GradientTape.gradient

    @functools.wraps(original)
    def hooked(*args: Any, **kwargs: Any) -> Any:
        return hook(original, *args, **kwargs)

    tf.GradientTape.gradient = hooked


@contextmanager
def outside_strategies() -> Iterator[None]:
    """Lets code run as where no strategy's scope is open."""
    graph = tf.compat.v1.get_default_graph()
    creators = graph._variable_creator_stack
    graph._variable_creator_stack = []
    distribute_lib._push_per_thread_mode(distribute_lib._get_default_replica_mode())
    try:
        yield
    finally:
        distribute_lib._pop_per_thread_mode()
        graph._variable_creator_stack = creators


@contextmanager
def without_advice() -> Iterator[None]:
    """Keeps TensorFlow from saying that replicas run faster in a graph."""
    logger = tf.get_logger()
    level = logger.level
    logger.setLevel("ERROR")
    try:
        yield
    finally:
        logger.setLevel(level)


def plain_copy(variable: Any, value: tf.Tensor) -> tf.Variable:
    """Returns a variable of no strategy's that Keras's optimizers take for another one.

    Args:
        variable: The framework's variable for which it stands in.
        value: Its value.
    """
    copy = tf.Variable(value, trainable=variable.trainable, name="copy", shape=variable.shape)
    # By which an optimizer finds what it keeps of it.
    vars(copy)["_unique_id"] = variable._unique_id
    return copy


# Functions of `tf.random` that draw; `shuffle` reorders.
_DRAWING = (
    "categorical",
    "gamma",
    "normal",
    "poisson",
    "shuffle",
    "stateless_categorical",
    "stateless_gamma",
    "stateless_normal",
    "stateless_poisson",
    "stateless_truncated_normal",
    "stateless_uniform",
    "truncated_normal",
    "uniform",
)


@contextmanager
def draws_replaced(draw: Callable[[str, Callable[[], Any], Any], Any]) -> Iterator[None]:
    """Has a function called where code calls TensorFlow's own draws.

    Args:
        draw: Gets the name, a function that draws, and the first argument.
    """
    places = [(tf.random, name) for name in _DRAWING] + [(tf.nn, "dropout")]
    originals = [getattr(owner, name) for owner, name in places]

    def replaced(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def drawn(*args: Any, **kwargs: Any) -> Any:
            first = args[0] if args else next(iter(kwargs.values()), None)
            known = name if name in ("shuffle", "dropout") else f"tf.random.{name}"
            return draw(known, lambda: original(*args, **kwargs), first)

        return drawn

    for (owner, name), original in zip(places, originals, strict=True):
        setattr(owner, name, replaced(name, original))
    try:
        yield
    finally:
        for (owner, name), original in zip(places, originals, strict=True):
            setattr(owner, name, original)


class RandomState:
    """The state of the generator from which eager draws without a seed of their own take one."""

    def __init__(self) -> None:
        """Remembers it."""
        self._own = vars(eager_context.context())
        self._before = {name: self._own.get(name) for name in ("_seed", "_rng")}
        numbers = self._before["_rng"]  # none before a seed is set
        self._state = None if numbers is None else numbers.getstate()

    def replace(self, seed: int) -> None:
        """Has draws take their seeds from another generator until `restore`.

        Args:
            seed: Its seed, one that users would not set: kernels with equal seeds go on drawing.
        """
        self._own.update(_seed=seed, _rng=random.Random(seed))

    def restore(self) -> None:
        """Puts it back."""
        self._own.update(self._before)
        numbers = self._before["_rng"]
        if numbers is None or numbers.getstate() == self._state:
            return
        numbers.setstate(self._state)
        # What was drawn before under the same seed would go on, instead of beginning again.
        context: Any = eager_context.context()
        context.clear_kernel_cache()


def compiled_likewise(compiled: Any, function: Callable[..., Any]) -> Any:
    """Returns a ``tf.function`` with the options of another one.

    Args:
        compiled: A ``tf.function``.
        function: What to compile.
    """
    return compiled._clone(python_function=function)


class _Explained(polymorphic_function.Function):
    """A ``tf.function`` whose calls say in our words what a lost worker did to them."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with explaining(FUNCTION):
            return super().__call__(*args, **kwargs)


def explained(compiled: Any) -> Any:
    """Has the calls of a ``tf.function`` say which worker is lost, if one is.

    It stays a ``tf.function``: users ask it for its graphs, or save it.

    Args:
        compiled: A ``tf.function``.
    """
    compiled.__class__ = _Explained
    return compiled


def mirrored(parts: Sequence[Any]) -> Any:
    """Returns a value of the framework's whose components are equal.

    Args:
        parts: A tensor on each device.
    """
    return distributed_values.Mirrored(parts)


def compiles_with_xla() -> bool:
    """Returns whether the graph that is being made is for XLA."""
    return control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph())


def is_distributed(variable: Any) -> bool:
    """Returns whether a strategy made the framework's variable.

    Args:
        variable: A variable of the framework.
    """
    kinds = (distributed_values.DistributedVariable, ps_values.AggregatingVariable)
    return isinstance(variable, kinds)


def let_variables_be_read() -> None:
    """Gives mirrored variables the conversions to numbers that ``tf.Variable`` has.

    ``int``, ``float``, ``bool`` and ``np.array`` of a mirrored or sync-on-read variable then give
    what ``.numpy()`` gives. TensorFlow leaves them out: ``bool`` is always true, the others raise.
    """

    def array(variable: Any, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        del copy  # `numpy` has made one
        return np.asarray(variable.numpy(), dtype)

    conversions: dict[str, Callable[..., Any]] = {
        "__array__": array,
        "__bool__": _truth,
        "__int__": lambda variable: int(variable.numpy()),
        "__float__": lambda variable: float(variable.numpy()),
        "__complex__": lambda variable: complex(variable.numpy()),
    }
    for name, conversion in conversions.items():
        setattr(distributed_values.DistributedVariable, name, conversion)


def _truth(variable: Any) -> bool:
    """Returns whether a mirrored variable's value is true, as ``tf.Variable`` does.

    TensorFlow's own code asks whether there is a variable at all (`check_destinations`).
    """
    asks = sys._getframe(1).f_globals["__name__"]
    return asks.startswith("tensorflow.") or bool(tf.convert_to_tensor(variable))


class _OnePassage(logging.Filter):
    """Lets TensorFlow advise once in a process, not in five steps, against eager replicas."""

    def __init__(self) -> None:
        super().__init__()
        self._passed = False

    def filter(self, record: logging.LogRecord) -> bool:
        if "eagerly has significant overhead" not in str(record.msg):
            return True
        passes, self._passed = not self._passed, True
        return passes


def advise_against_eager_replicas_once() -> None:
    """Keeps TensorFlow from logging the same advice for each of the first eager steps."""
    tf.get_logger().addFilter(_OnePassage())


def collective_keys() -> list[int]:
    """Returns the key of a new strategy, and that of the next one, for the test that watches it."""
    devices = ["CPU:0", "CPU:1"]
    engines = [mirrored_strategy(devices, share_memory=True) for _ in range(2)]
    return [engine.extended._collective_key_base for engine in engines]


def private_names() -> tuple[object, ...]:
    """Returns what this file needs of TensorFlow, for the test that watches it."""
    return (
        autograph_config.DoNotConvert,
        distributed_values.Mirrored,
        distributed_values.DistributedVariable.numpy,
        control_flow_util.GraphOrParentsInXlaContext,
        tf.__internal__.autograph.control_status_ctx,
        tf.__internal__.autograph.tf_convert,
        distribute_lib._get_default_strategy,
        distribute_lib._get_default_replica_mode,
        eager_context.Context.clear_kernel_cache,
        distribute_lib._push_per_thread_mode,
        distribute_lib._pop_per_thread_mode,
        distribute_lib._ThreadMode,
        tf.__internal__.distribute.interim.maybe_merge_call,
    )
