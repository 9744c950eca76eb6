"""State that the replicas divide (`sharding="optimizer"`): how slots are made, and updated.

A slot, an optimizer's variable that belongs to a weight, is a `Divided`. An optimizer's update runs
once for each replica (see `outside_replicas.apply_everywhere`), on parts of gradients, weights and
slots; then the replicas gather the new weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, final
from weakref import WeakKeyDictionary, WeakSet, ref

import keras
import numpy as np
import tensorflow as tf

from kerasdist import keras_compat
from kerasdist.backends.pieces import HeldPiece, Region
from kerasdist.backends.tensorflow.division import Division
from kerasdist.backends.tensorflow.group import Group
from kerasdist.backends.tensorflow.private.divided import Divided
from kerasdist.backends.tensorflow.private.scopes import NativeScope, OneCopy
from kerasdist.backends.tensorflow.variables import copies, native
from kerasdist.sharding import Sharding
from kerasdist.user_warnings import warn_user


@final
@dataclass(frozen=True)
class _Rule:
    """Which slots are divided, and over whom. It lives no longer than its strategy."""

    weak_group: ref[Group]
    sharding: Sharding

    @property
    def group(self) -> Group:
        """The replicas."""
        group = self.weak_group()
        assert group is not None
        return group

    def division(self, optimizer: Any, slot: Any, weight: Any) -> Division | None:
        """Returns how a weight's slot is divided, None if it stays whole.

        A constraint may look at the whole weight.
        """
        shape = tuple(weight.shape)
        is_gradient = slot.name.endswith("_gradient_accumulator")
        needs_whole = is_gradient and _clips_by_norm(optimizer)
        if weight.constraint is not None or needs_whole or tuple(slot.shape) != shape:
            return None
        group = self.group
        replicas = group.native_strategy.num_replicas_in_sync
        axis = self.sharding.axis(shape, replicas)
        return None if axis is None else Division(shape, axis, replicas, group.local.start)


_rules: WeakKeyDictionary[tf.distribute.Strategy, _Rule] = WeakKeyDictionary()
# The optimizers for which the user was warned that their slots stay whole.
_whole: WeakSet[Any] = WeakSet()


def add(group: Group, sharding: Sharding) -> None:
    """Divides the slots that optimizers make under a group's native strategy from now on."""
    _rules[group.native_strategy] = _Rule(ref(group), sharding)
    _install()


@cache
def _install() -> None:
    keras_compat.install_slots(_made)
    keras_compat.install_update(_update, _average, _are_whole)


def _made(
    original: Callable[..., Any],
    optimizer: Any,
    reference_variable: Any,  # Keras's name, by which some optimizers pass it
    *args: Any,
    **kwargs: Any,
) -> Any:
    slot = original(optimizer, reference_variable, *args, **kwargs)
    divide(optimizer, slot, reference_variable)
    return slot


def divide(optimizer: Any, slot: Any, weight: Any) -> None:
    """Divides a slot, if its strategy says so."""
    whole = keras_compat.stored_value(slot)
    is_mirrored = isinstance(whole, tf.distribute.DistributedValues)
    native_strategy = whole.distribute_strategy if is_mirrored else None
    rule = None if native_strategy is None else _rules.get(native_strategy)
    if rule is None or isinstance(whole, Divided) or not isinstance(weight, keras.Variable):
        return
    division = rule.division(optimizer, slot, weight)
    if division is None:
        return
    if not keras_compat.is_elementwise(optimizer):
        _say_that_it_stays_whole(optimizer)
        return
    group = rule.group
    with nullcontext() if tf.distribute.has_strategy() else NativeScope(native_strategy):
        parts: Any = tf.Variable(
            lambda: tf.zeros(division.part_shape, whole.dtype), trainable=False, name=slot.name
        )
        parts.__class__ = Divided
        parts.division, parts.weight = division, weight
        parts.joined = lambda own, here: group.joined([here], [own])[0]
        first = whole.values[0].read_value()
        for index, copy in enumerate(parts.values):
            copy.assign(division.part(first, index))
    keras_compat.store_value(slot, parts)


def _say_that_it_stays_whole(optimizer: Any) -> None:
    if optimizer in _whole:
        return
    _whole.add(optimizer)
    kinds = ", ".join(one.__name__ for one in keras_compat.ELEMENTWISE)
    warn_user(
        f"Each replica holds all variables of the optimizer {optimizer.name!r}, in spite of "
        f"sharding: on TensorFlow an optimizer is divided that updates each element of a weight by "
        f"itself ({kinds}). Received: {type(optimizer).__name__}. Use one of these, or "
        "KERAS_BACKEND=jax, on which every optimizer is divided."
    )


def divisions(optimizer: Any) -> dict[str, Division]:
    """Returns how the weights are divided whose slots are, by their keys in the optimizer."""
    held = keras_compat.stored_values(optimizer.variables)
    return {native(one.weight)._unique_id: one.division for one in held if isinstance(one, Divided)}


def pieces(variable: Any) -> list[HeldPiece]:
    """Returns what the replicas of this process hold of a divided slot; nothing of another."""
    parts = keras_compat.stored_value(variable)
    if not isinstance(parts, Divided):
        return []
    return [_piece(parts.division, index, copy) for index, copy in enumerate(parts.values)]


def _piece(division: Division, index: int, copy: tf.Variable) -> HeldPiece:
    begin = division.begin(index)
    region = Region.along(division.shape, division.axis, begin, begin + division.size)

    def write(values: np.ndarray[Any, Any]) -> None:
        copy.assign(values.reshape(division.part_shape))

    return HeldPiece(region, copy.dtype.name, lambda: copy.read_value().numpy(), write)


def gather(
    native_strategy: tf.distribute.Strategy, parts: dict[str, Division], variables: Sequence[Any]
) -> None:
    """Gives each replica the other replicas' parts of the weights, which they have updated."""
    weights = [one for one in map(native, variables) if one._unique_id in parts]
    own = [parts[one._unique_id] for one in weights]
    columns = []
    for weight, division in zip(weights, own, strict=True):
        columns.append([])
        for index, copy in enumerate(weight.values):
            with tf.device(copy.device):
                columns[-1].append(division.part(copy.read_value(), index))
    wholes = _rules[native_strategy].group.joined(columns, own, here=False)
    for weight, whole in zip(weights, map(copies, wholes), strict=True):
        for index, copy in enumerate(weight.values):
            with tf.device(copy.device):
                copy.assign(whole[index % len(whole)])


def _clips_by_norm(optimizer: Any) -> bool:
    """Whether an optimizer needs whole gradients until it has clipped them."""
    return bool(optimizer.clipnorm or optimizer.global_clipnorm)


def _update(
    original: Callable[..., Any], optimizer: Any, grads: Sequence[Any], variables: Sequence[Any]
) -> None:
    """Accumulates and applies a replica's parts of the gradients."""
    here = keras_compat.optimizer_strategy(optimizer)
    if not isinstance(here, OneCopy) or not here.divides:
        original(optimizer, grads, variables)
        return

    def own(gradient: Any, variable: Any) -> Any:
        _, division = here.part(variable)
        if division is None:
            return gradient
        if not isinstance(gradient, tf.IndexedSlices):
            gradient = tf.ensure_shape(gradient, division.shape)  # it may be unknown
        return gradient if _clips_by_norm(optimizer) else here.cut(variable, gradient)

    parts = [own(*pair) for pair in zip(grads, map(native, variables), strict=True)]
    original(optimizer, parts, variables)


# The moving averages of weights (`use_ema`).


def _average(original: Callable[..., Any], optimizer: Any, variables: Sequence[Any]) -> None:
    """Updates a replica's parts of the averages, by its parts of the weights."""
    here = keras_compat.optimizer_strategy(optimizer)
    if not isinstance(here, OneCopy) or not here.divides:
        original(optimizer, variables)
        return

    def part(variable: Any) -> Any:
        return None if variable is None else here.part(native(variable))[0]

    with keras_compat.averages_replaced(optimizer, part):
        original(optimizer, [part(one) for one in variables])


def _are_whole(optimizer: Any) -> bool:
    """Whether code reads and assigns whole values of averages that are divided."""
    if isinstance(keras_compat.optimizer_strategy(optimizer), OneCopy):
        return False
    held = (native(one) for one in keras_compat.averages(optimizer) if one is not None)
    return any(isinstance(one, Divided) for one in held)
