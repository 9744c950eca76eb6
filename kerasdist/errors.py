"""Errors that kerasdist raises.

Each message says what was expected, then ``Received: name=value``, then what to do. Each class also
derives from the built-in exception that users of Keras and ``tf.distribute`` would catch.
"""

from __future__ import annotations


class KerasdistError(Exception):
    """The base class of every error that kerasdist raises on purpose."""


class DeviceError(KerasdistError, ValueError):
    """A device is unknown, missing or named twice, or CPU devices were set up too late."""


class ScopeError(KerasdistError, RuntimeError):
    """A strategy's scope was entered, left or used where this is not allowed."""


class UnsupportedError(KerasdistError, NotImplementedError):
    """The backend in use lacks the requested feature; the message says what to use instead."""


class VersionError(UnsupportedError):
    """The installed Keras or framework lacks what a feature needs; see ``kerasdist doctor``."""


class InputError(KerasdistError, ValueError):
    """A batch or a dataset cannot be divided among the replicas."""


class ReplicaError(KerasdistError, RuntimeError):
    """The replicas of a step make different collective calls, or pass different shapes to them."""


class ShapeError(ReplicaError, ValueError):
    """The tensors of the replicas have shapes that cannot be combined."""


class StateLostError(KerasdistError, RuntimeError):
    """A step failed after it had overwritten the model's state, so the state is lost."""


class BackendError(KerasdistError, ImportError):
    """The backend that Keras is told to use does not exist, or is not installed."""


class NotOneDeviceError(KerasdistError, ValueError):
    """A training step under a strategy does not compute the same numbers as on one device."""


class ClusterError(KerasdistError, ValueError):
    """The environment variables do not describe a cluster, or contradict each other."""


class JobError(KerasdistError, RuntimeError):
    """The workers of a job do not find each other, or this process is not one of the workers."""


class WorkerLostError(JobError):
    """A worker of the job died, stopped answering, or ended with an error."""


class DisagreementError(JobError):
    """The workers of a job differ in their model, data, version, or number of steps."""


class BackupError(KerasdistError, OSError):
    """A backup is damaged, was written by another script, or is in use by another run."""
