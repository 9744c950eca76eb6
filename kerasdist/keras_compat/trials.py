"""The parts of Keras that a trial of a training step looks at: losses, metrics, seeds, logs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from keras.src import tree
from keras.src.trainers.compile_utils import CompileLoss
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from keras.src.utils.python_utils import pythonify_logs

from kerasdist.keras_compat.models import ops

if TYPE_CHECKING:
    import keras


def numbers_of(logs: object) -> dict[str, Any]:
    """Returns the logs of a step as Keras passes them to callbacks."""
    return pythonify_logs(logs) if isinstance(logs, dict) else {}


def losses_on(layer: keras.Layer) -> list[Any]:
    """Returns the losses of a layer's last call, as Keras's own list."""
    return layer._losses


def clear_losses_on(layers: Iterable[keras.Layer]) -> None:
    """Removes the losses of the last calls of layers."""
    for layer in layers:
        layer._losses.clear()


def loss_ids_on(layer: keras.Layer) -> set[int]:
    """Returns Keras's set of the ids of a layer's losses in a stateless scope."""
    return layer._loss_ids


def compiled_losses(model: keras.Model) -> Any:
    """Returns the loss of `compile`, in the structure in which it was passed."""
    compiled = getattr(model, "_compile_loss", None)
    return compiled._user_loss if isinstance(compiled, CompileLoss) else None


def compiled_metrics(model: keras.Model) -> list[Any]:
    """Returns the metrics of `compile`, weighted ones too, as they were passed."""
    compiled = getattr(model, "_compile_metrics", None)
    if compiled is None:
        return []
    return [compiled._user_metrics, compiled._user_weighted_metrics]


def whole_batch(x: object, y: object, sample_weight: object) -> Any:
    """Returns arrays as one batch of tensors, as Keras's loop passes it to a step."""
    rows = len(next(leaf for leaf in tree.flatten(x) if leaf is not None))
    adapter = ArrayDataAdapter(x, y=y, sample_weight=sample_weight, batch_size=rows, shuffle=False)
    batch = next(iter(adapter.get_numpy_iterator()))
    return tree.map_structure(
        lambda leaf: None if leaf is None else ops.convert_to_tensor(leaf), batch
    )


def seed_states(model: keras.Model) -> list[Any]:
    """Returns the variables that hold the states of a model's seed generators."""
    layers = model._flatten_layers()
    return [generator.state for layer in layers for generator in layer._seed_generators]
