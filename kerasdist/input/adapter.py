"""A Keras data adapter around another one, for a backend that places batches by itself."""

from __future__ import annotations

from typing import Any

from kerasdist import keras_compat


class WrappedAdapter(keras_compat.DataAdapter):
    """Passes every call on to the inner adapter; a backend's subclass overrides one method."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def get_numpy_iterator(self) -> Any:
        """Returns the inner adapter's batches as NumPy arrays."""
        return self._inner.get_numpy_iterator()

    def get_tf_dataset(self) -> Any:
        """Returns the inner adapter's batches as a ``tf.data.Dataset``."""
        return self._inner.get_tf_dataset()

    def get_jax_iterator(self) -> Any:
        """Returns the inner adapter's batches as arrays that JAX takes."""
        return self._inner.get_jax_iterator()

    def get_torch_dataloader(self) -> Any:
        """Returns the inner adapter's batches as a torch ``DataLoader``."""
        return self._inner.get_torch_dataloader()

    @property
    def builtin_prefetch(self) -> bool:
        """True: Keras 3.12 would send a worker's batches to one device (on JAX)."""
        return True

    @property
    def num_batches(self) -> int | None:
        """Number of batches, None where it is not known."""
        return self._inner.num_batches

    @property
    def batch_size(self) -> int | None:
        """Number of examples in a batch, None where it is not known."""
        return self._inner.batch_size

    @property
    def has_partial_batch(self) -> bool | None:
        """Whether the last batch is smaller."""
        return self._inner.has_partial_batch

    @property
    def partial_batch_size(self) -> int | None:
        """The size of the last batch, if it is smaller."""
        return self._inner.partial_batch_size

    def on_epoch_begin(self) -> None:
        """Passes the event on to the inner adapter."""
        self._inner.on_epoch_begin()

    def on_epoch_end(self) -> None:
        """Passes the event on to the inner adapter."""
        self._inner.on_epoch_end()
