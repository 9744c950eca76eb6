"""`ChiefOnly`, and the base class of callbacks that wrap another callback."""

from __future__ import annotations

from typing import final

import keras

from kerasdist.job.job import current_job

# The names of the methods that Keras may call on a callback.
_EVENTS = [name for name in dir(keras.callbacks.Callback) if name.startswith("on_")]


class DelegatingCallback(keras.callbacks.Callback):
    """Passes Keras's events on to an inner callback; with ``heard=False``, passes on no event."""

    def __init__(self, inner: keras.callbacks.Callback, heard: bool = True) -> None:
        super().__init__()
        self.inner = inner
        self._is_heard = heard
        if heard:
            for name in _EVENTS:
                # Keras can run callbacks in another thread, but only if none of them overrides the
                # base class's methods for batches. Keras recognizes the base class's methods by a
                # mark on them. So this object gets the inner callback's own methods: a method that
                # the inner callback does not override still has the mark.
                setattr(self, name, getattr(inner, name))

    def set_params(self, params: object) -> None:
        """Passes the parameters on to the inner callback."""
        super().set_params(params)
        self.inner.set_params(params)

    def set_model(self, model: object) -> None:
        """Passes the model on to the inner callback if the inner callback gets events.

        A callback that gets no events must not get the model either, because some callbacks write
        files as soon as they have the model (TensorBoard writes the model's graph).
        """
        super().set_model(model)
        if self._is_heard:
            self.inner.set_model(self.model_for(model))

    def model_for(self, model: object) -> object:
        """Returns the model that the inner callback sees."""
        return model


@final
class ChiefOnly(DelegatingCallback):
    """Lets a callback run only on the chief.

    Use this class for callbacks that write or print. The callback must not need the other workers:
    it must not call a collective, ``evaluate`` or ``predict``.

    Example::

        report = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: print(logs))
        model.fit(x, y, callbacks=[kd.callbacks.ChiefOnly(report)])
    """

    def __init__(self, callback: keras.callbacks.Callback) -> None:
        """Wraps a callback.

        Args:
            callback: The callback to wrap.
        """
        job = current_job()
        super().__init__(callback, heard=job is None or job.is_chief)
