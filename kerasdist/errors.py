"""Errors that kerasdist raises.

Each message says what was expected, then ``Received: name=value``, then what to do. Each class also
derives from the built-in exception that users of Keras and ``tf.distribute`` would catch.
"""

from __future__ import annotations


class KerasdistError(Exception):
    """Base of every error that kerasdist raises on purpose."""


class DeviceError(KerasdistError, ValueError):
    """A device is unknown, named twice, missing, or cannot be prepared any more."""


class ScopeError(KerasdistError, RuntimeError):
    """A strategy's scope was entered, left or used in a way that has no meaning."""


class UnsupportedError(KerasdistError, NotImplementedError):
    """The backend in use cannot have this feature; the message says what to use instead."""


class InputError(KerasdistError, ValueError):
    """A batch cannot be divided over the replicas."""


class ReplicaError(KerasdistError, RuntimeError):
    """The replicas of one step disagree: on a collective, its shapes, or how many there are."""
