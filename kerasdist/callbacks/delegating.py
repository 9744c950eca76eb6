"""Callbacks that stand before another one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

# Everything that Keras calls on a callback.
_EVENTS = [name for name in dir(keras.callbacks.Callback) if name.startswith("on_")]


class DelegatingCallback(keras.callbacks.Callback):
    """Hands on what Keras calls; abstract: a subclass says what it keeps to itself."""

    def __init__(self, inner: keras.callbacks.Callback, heard: bool = True) -> None:
        """Stands before a callback.

        Args:
            inner: The callback.
            heard: Whether it learns of anything on this worker.
        """
        super().__init__()
        self.inner = inner
        if heard:
            for name in _EVENTS:
                # On the object: Keras looks at each method, whether it is the empty default.
                setattr(self, name, getattr(inner, name))

    def set_params(self, params: Any) -> None:
        """Tells the inner callback, too."""
        super().set_params(params)
        self.inner.set_params(params)

    def set_model(self, model: Any) -> None:
        """Tells the inner callback, too."""
        super().set_model(model)
        self.inner.set_model(self.model_for(model))

    def model_for(self, model: Any) -> Any:
        """Returns the model as the inner callback is to see it.

        Args:
            model: The model.
        """
        return model

    def after(self, event: str, then: Callable[..., None]) -> None:
        """Lets something happen behind an event of the inner callback.

        Args:
            event: The event's name.
            then: Called with the same arguments.
        """
        first = getattr(self, event)

        def both(*args: Any, **kwargs: Any) -> None:
            first(*args, **kwargs)
            then(*args, **kwargs)

        setattr(self, event, both)
