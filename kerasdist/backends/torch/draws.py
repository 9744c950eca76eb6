"""Keras's global seed generator, for replicas.

Keras makes it at the first unseeded draw of a thread, from Python's random numbers. Replicas must share the
one of the calling thread, or each would draw from a generator of its own, in an order that depends on timing.
"""

from __future__ import annotations

import threading
from typing import Any, final

import keras

from kerasdist import context, keras_seam


@final
class FirstDraw:
    """Stands for the global seed generator until somebody draws from it."""

    def __init__(self) -> None:
        """Makes the place holder."""
        self._lock = threading.Lock()
        self.generator: Any = None

    def next(self, ordered: bool = True) -> Any:
        """Returns the next seed, as ``keras.random.SeedGenerator`` does.

        Args:
            ordered: As Keras's.
        """
        with self._lock:
            if self.generator is None:
                with keras_seam.outside_stateless_scopes(), context.replica_scope(None):
                    self.generator = keras.random.SeedGenerator()
        return self.generator.next(ordered=ordered)
