"""Functions for the steps of `fit`, `evaluate` and `predict`: for buffers, rows and metrics."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import torch

from kerasdist import config, keras_compat
from kerasdist.backends.torch.replica.placing import Version
from kerasdist.backends.torch.workers.process_group import Group
from kerasdist.core.structures import flatten, map_leaves
from kerasdist.errors import UnsupportedError
from kerasdist.training.metrics import metrics_of


def layers_with_buffers(model: Any) -> list[Any]:
    """Returns the layers of a model that have torch buffers of their own; may include the model."""
    layers = [model, *keras_compat.flat_layers(model)]
    # Wrappers are left out, because each replica has its own copies of the buffers of a wrapped
    # module.
    wrapper = keras.layers.TorchModuleWrapper
    return [
        one
        for one in layers
        if next(one.named_buffers(recurse=False), None) and not isinstance(one, wrapper)
    ]


def buffers_of(layer: Any) -> dict[str, torch.Tensor]:
    """Returns the buffers that a layer itself has registered, by their names."""
    return dict(layer.named_buffers(recurse=False, remove_duplicate=False))


def versions_of(layers: Sequence[Any]) -> list[tuple[Any, str, Version]]:
    """Returns, for each buffer of these layers, the layer, the buffer's name and its `Version`."""
    found = [(layer, buffers_of(layer)) for layer in layers]
    return [(layer, name, Version(one)) for layer, own in found for name, one in own.items()]


def require_unchanged(before: Sequence[tuple[Any, str, Version]]) -> None:
    """Refuses a step that changes a buffer of a Keras layer, which all replicas share."""
    for layer, name, version in before:
        if not version.is_of(getattr(layer, name)):
            raise UnsupportedError(
                "Expected a step to change Keras variables alone, of which each replica has its "
                f"own. Received: a change of the buffer '{layer.name}.{name}', which all replicas "
                "share. Make the buffer a weight, by self.add_weight(trainable=False), or put the "
                "module that has the buffer into keras.layers.TorchModuleWrapper."
            )


@contextmanager
def hinting() -> Generator[None]:
    """Adds advice to an out-of-memory error."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        if config.most_examples_at_once() != "auto":
            error.add_note(
                'kerasdist.config.set_most_examples_at_once("auto"), before the first step, has '
                "each replica compute as many examples at a time as it has memory for, with the "
                "same numbers."
            )
        raise


def of_all(group: Group, own: object, purpose: str) -> Any:
    """Returns the rows of all workers, one after another. All workers must call this function.

    `purpose` says in error messages what the rows are for.
    """
    if group.size == 1:
        return own
    present = [leaf for leaf in flatten(own) if leaf is not None]
    if not present:
        return own
    tensors = [keras_compat.ops.convert_to_tensor(leaf) for leaf in present]
    gathered = iter(group.gather(purpose, tensors, 0))
    return map_leaves(lambda leaf: None if leaf is None else next(gathered)[0], own)


def uses_no_update(model: keras.Model) -> bool:
    """Returns whether the code after ``optimizer.apply`` in a step works without the new weights.

    It does if all of this code is Keras's own, and updates only metrics that Keras itself defines.
    """
    for metric in keras_compat.attached_metrics(model):
        if not getattr(metric, "built", True):  # not so in `fit`, which builds the metrics first
            return False
    for metric in metrics_of(model):
        # For a metric that is bound to a strategy, `type` would return kerasdist's subclass.
        kind = metric.__class__
        if kind is keras.metrics.MeanMetricWrapper or not keras_compat.is_builtin(kind):
            return False  # the metric is the user's, or calls a function that may be the user's
    return keras_compat.applies_directly(model.optimizer)


def sums_of(model: keras.Model) -> Iterator[keras.Variable]:
    """Yields those variables of a model's metrics whose values are summed over the replicas."""
    for metric in metrics_of(model):
        yield from (one for one in metric.variables if one.aggregation == "sum")
