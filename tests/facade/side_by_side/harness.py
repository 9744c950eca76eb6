"""How a case is declared, and how what it returns is compared.

A case is a function of a namespace, ``tf.distribute`` or ``kerasdist``, and a strategy of it. It is
called with both, and must return the same.
"""

import keras
import numpy as np
import tensorflow as tf

CASES = []


def case(function):
    CASES.append(function)
    return function


def plain(value):
    """What is compared: the kinds of distributed values, and NumPy for tensors and variables."""
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if isinstance(value, tf.Variable | keras.Variable) or value is None:
        return value if value is None else value.numpy()
    if isinstance(value, tf.distribute.DistributedValues):
        return {type(value).__name__: [plain(one) for one in value.values]}
    if isinstance(value, tf.IndexedSlices):
        value = tf.convert_to_tensor(value)
    if isinstance(value, tf.SparseTensor):
        value = tf.sparse.to_dense(value)
    if isinstance(value, tf.RaggedTensor):
        return value.to_list()
    return value.numpy() if tf.is_tensor(value) else value


def same(native, ours, where="result"):
    assert type(native) is type(ours), f"{where}: {native!r} natively, ours {ours!r}"
    if isinstance(native, dict):
        assert native.keys() == ours.keys(), f"{where}: {native} natively, ours {ours}"
        for key in native:
            same(native[key], ours[key], f"{where}.{key}")
    elif isinstance(native, list):
        assert len(native) == len(ours), f"{where}: {native} natively, ours {ours}"
        for index, (one, other) in enumerate(zip(native, ours, strict=True)):
            same(one, other, f"{where}[{index}]")
    elif isinstance(native, np.ndarray | np.generic):
        assert native.dtype == ours.dtype, f"{where}: {native.dtype} natively, ours {ours.dtype}"
        assert np.allclose(native, ours, rtol=1e-6, atol=1e-7), f"{where}: {native}, ours {ours}"
    else:
        assert native == ours, f"{where}: {native!r} natively, ours {ours!r}"


def per_replica(strategy, function):
    """A value with ``function(replica)`` on each replica."""
    return strategy.experimental_distribute_values_from_function(
        lambda here: function(here.replica_id_in_sync_group)
    )


def ways(strategy, step, *args):
    """What `step` gives in `run` eagerly, in a compiled function, and compiled itself."""
    return [
        strategy.run(step, args=args),
        tf.function(lambda *args: strategy.run(step, args=args))(*args),
        strategy.run(tf.function(step), args=args),
    ]


def error_of(call):
    """The built-in class that an error is one of."""
    try:
        call()
    except tf.errors.InvalidArgumentError:
        return "ValueError"  # what does not fit is told by an operation, or before there is one
    except (ValueError, TypeError, NotImplementedError, KeyError, RuntimeError) as error:
        return next(c.__name__ for c in type(error).__mro__ if c.__module__ == "builtins")
    return "no error"
