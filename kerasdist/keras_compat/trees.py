"""Registers a class with `keras.tree`, for the libraries of trees that it uses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from keras.src.tree import tree_api

# The parts of an object, in order.
Parts = Callable[[Any], Sequence[Any]]


def register_tree_node(kind: type[Any], parts: Parts) -> None:
    """Lets `keras.tree` flatten and rebuild the objects of a class."""
    tree: Any = tree_api.tree_impl  # Keras's module for the tree library that it has chosen
    _REGISTER[tree.__name__.rpartition(".")[2]](tree, kind, parts)


def _by_optree(tree: Any, kind: type[Any], parts: Parts) -> None:
    tree.optree.register_pytree_node(
        kind,
        lambda value: (parts(value), None),
        lambda _, children: kind(tuple(children)),
        namespace="keras",
    )


def _by_torch(tree: Any, kind: type[Any], parts: Parts) -> None:
    torch_tree = tree.torch_tree
    torch_tree.register_pytree_node(
        kind,
        lambda value: (list(parts(value)), None),
        lambda children, _: kind(tuple(children)),
        flatten_with_keys_fn=lambda value: (
            [(torch_tree.SequenceKey(index), part) for index, part in enumerate(parts(value))],
            None,
        ),
    )


# By the name of Keras's module.
_REGISTER: dict[str, Callable[[Any, type[Any], Parts], None]] = {
    "optree_impl": _by_optree,
    "torchtree_impl": _by_torch,
}
