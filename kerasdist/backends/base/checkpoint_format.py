"""Checkpoints in the form that a framework's users have: one folder, which all workers share."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import keras

from kerasdist.backends.base.interface import ReplicaSet

# The place of an array in the tree of a checkpoint.
Key = tuple[str, ...]


class CheckpointFormat(abc.ABC):
    """How the backend's library writes and reads a tree of variables.

    All workers must call `save` and `load` together, and each has the whole tree.

    Attributes:
        marker: The name of a file that each complete checkpoint has.
    """

    marker: str

    def folder_in(self, path: Path) -> Path | None:
        """Returns the folder with the arrays of a checkpoint; None if there is none.

        Args:
            path: The checkpoint's folder.
        """
        return path if (path / self.marker).is_file() else None

    @abc.abstractmethod
    def shapes(self, path: str) -> Mapping[Key, tuple[int, ...]]:
        """Returns the shapes of a checkpoint's arrays, without reading any.

        Args:
            path: The folder with the arrays, or its address.
        """

    @abc.abstractmethod
    def save(self, path: str, tree: Mapping[str, Any], replicas: ReplicaSet | None) -> None:
        """Writes variables.

        Args:
            path: A folder that does not exist yet, or its address.
            tree: Nested dictionaries of Keras variables.
            replicas: The replicas that hold the variables; None without a strategy.
        """

    @abc.abstractmethod
    def load(
        self, path: str, wanted: Sequence[tuple[Key, keras.Variable]], replicas: ReplicaSet | None
    ) -> None:
        """Gives variables the values of a checkpoint, in their own types.

        Args:
            path: The folder with the arrays, or its address.
            wanted: Which array each variable gets, of the variable's shape.
            replicas: The same as for `save`.
        """
