"""`kerasdist.predict_to`: each worker passes its own predictions to a function and keeps none."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from kerasdist.api.functions import function
from kerasdist.api.scopes import get_strategy
from kerasdist.backends.base.model_trainer import defined_by_user
from kerasdist.core import ownership
from kerasdist.core.structures import flatten, map_leaves
from kerasdist.errors import UnsupportedError
from kerasdist.input.sources import RowDataset, batches_of
from kerasdist.keras_compat import is_array, is_builtin

if TYPE_CHECKING:
    from numpy.typing import NDArray


def predict_to(
    write: Callable[[NDArray[np.int64], Any], None],
    model: keras.Model,
    x: object,
    *,
    batch_size: int = 32,
) -> None:
    """Predicts as ``model.predict`` does, but passes each batch's outputs to `write`, keeping none.

    ``predict`` keeps all predictions until it returns, and in a job every worker has all of them.
    ``predict_to`` calls `write` on each worker for the rows of the worker's own replicas, batch by
    batch, with the numbers of these rows. All workers together write each row once. In a job all
    workers must call ``predict_to``, with equal `x`.

    Example::

        def write(rows, outputs):
            np.save(f"scores-{rows[0]:09d}.npy", outputs)

        kd.predict_to(write, model, x_test, batch_size=256)

    Args:
        write: Gets the numbers of some rows of `x`, as int64 of shape ``(n,)``, and the model's
            outputs for these rows: NumPy arrays of shape ``(n, ...)``, nested as the model nests
            them.
        model: A built model. It is called with ``training=False``.
        x: The same as for ``predict``: arrays with the examples along axis 0, nested as the model's
            inputs; or a dataset or generator of batches ``x``, ``(x, y)``, ``(x, y, weights)``.
        batch_size: Number of rows of a global batch, if `x` consists of arrays.

    Raises:
        TypeError: If `model` is not a Keras model.
        UnsupportedError: If the model is not built, or has a `predict_step` of its own.

    Source: ``keras.Model.predict``; Keras issue 21642 asks for predictions that are not kept.
    """
    if not isinstance(model, keras.Model):
        raise TypeError(
            "Expected a function, a model and data, in this order. Received: "
            f"model={model!r:.200}. Call kerasdist.predict_to(write, model, x)."
        )
    if not (model.built and is_builtin(defined_by_user(model, "predict_step"))):
        raise UnsupportedError(
            "Expected a built model with Keras's own `predict_step`. Received: model="
            f"{model.name!r}, built={model.built}. Call the model on a batch first; with a "
            "`predict_step` of your own write a loop with strategy.run."
        )
    owners = (ownership.strategy_of(variable) for variable in model.variables)
    strategy: Any = next((owner for owner in owners if owner is not None), None) or get_strategy()
    dataset = RowDataset((x,)).batch(batch_size) if _is_of_arrays(x) else x
    begins: deque[int] = deque()

    def numbered() -> Iterator[tuple[Any, Any]]:
        begin = 0
        for batch in batches_of(dataset)():
            inputs = keras.utils.unpack_x_y_sample_weight(batch)[0]
            rows = np.shape(flatten(inputs)[0])[0]
            begins.append(begin)
            begin += rows
            yield inputs, np.arange(rows, dtype="int32")

    @function
    def predict_batch(inputs: object) -> Any:
        return strategy.run(lambda own: model(own, training=False), args=(inputs,))

    for inputs, places in strategy.distribute_dataset(numbered()):
        outputs = strategy.experimental_local_results(predict_batch(inputs))
        begin = begins.popleft()
        for own, place in zip(outputs, strategy.experimental_local_results(places), strict=True):
            rows = begin + np.asarray(keras.ops.convert_to_numpy(place), "int64")
            if rows.size:
                write(rows, map_leaves(keras.ops.convert_to_numpy, own))


def _is_of_arrays(x: object) -> bool:
    return (isinstance(x, list | tuple | dict) and all(map(is_array, flatten(x)))) or is_array(x)
