"""The examples of tf.distribute's docstrings: a case each, named after where the example stands."""

from tests.facade.cases_docstrings import (
    central_storage,
    contexts,
    datasets,
    extended,
    logical_devices,
    replicas,
    strategies,
    tpu,
)

__all__ = [
    "central_storage",
    "contexts",
    "datasets",
    "extended",
    "logical_devices",
    "replicas",
    "strategies",
    "tpu",
]
