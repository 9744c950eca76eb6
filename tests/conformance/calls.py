"""Calls of a compiled model, drawn from a seed: what users give to `fit` and its kin, and mistakes.

Few shapes only: each new one is traced or compiled, for the model in the scope and for the other.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.conformance.lazy import keras, tf, torch
from tests.conformance.models import dataset_of

FEATURES, CLASSES, BATCH = 4, 3, 4
ROWS = (8, 6, 3)

_DATA = np.random.default_rng(15)
X = _DATA.normal(size=(8, FEATURES)).astype("float32")
Y = np.array([0, 2, 1, 1, 0, 2, 2, 0], "int32")
WEIGHTS = np.array([0.5, 0.0, 2.0, 1.0, 1.5, 0.0, 0.3, 1.0], "float32")
CLASS_WEIGHTS = ({0: 0.5, 1: 2.0, 2: 1.0}, {0: 1.0, 1: 0.0, 2: 3.0}, {1: 2})


@dataclass(frozen=True)
class Call:
    method: str
    arguments: dict[str, Any]

    def __str__(self):
        given = [f"{name}={_shown(value)}" for name, value in self.arguments.items()]
        return f"{self.method}({', '.join(given)})"


def _shown(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_shown, value))})"
    if not hasattr(value, "dtype"):
        return repr(value)
    return f"<{len(value)} rows, {type(value).__name__}, {value.dtype}>"


def calls(backend: str, number: int) -> Iterator[Call]:
    """The same calls each time, with arguments of their own: generators serve once."""
    drawn = random.Random(15)
    for _ in range(number):
        make = drawn.choices(
            (_fit, _evaluate, _predict, _train_on_batch, _test_on_batch, _predict_on_batch),
            (6, 3, 2, 5, 3, 1),
        )[0]
        given = make(drawn, backend)
        method = make.__name__[1:]
        if drawn.random() < 0.12:
            given |= _mistake(drawn, method)
        yield Call(method, given)


def _array(drawn, array, *containers):
    """In a container: the array itself, a list, a tensor, or an array of another type."""
    container = drawn.choice(containers)
    match container:
        case "array":
            return array.copy()
        case "list":
            return array.tolist()
        case "tensor":
            return keras.ops.convert_to_tensor(array)
    return array.astype(container)


def _examples(drawn, count):
    """Arguments; wide types go with wide examples, as each pair is one more to trace."""
    x = _array(drawn, X[:count], *("array",) * 4, "tensor", "float64", "float16")
    is_wide = getattr(x, "dtype", None) == np.float64
    y = _array(drawn, Y[:count], *(["int64"] if is_wide else ["array", "tensor"]))
    weights = None
    if drawn.random() >= 0.6:
        kinds = ["float64"] if is_wide else ["array", "array", "tensor"]
        weights = _array(drawn, WEIGHTS[:count], *kinds)
    return {"x": x, "y": y, "sample_weight": weights}


def _source(drawn, backend, count):
    """Batches of rows from something else than arrays, and whether they serve once."""
    kinds = ["generator", "PyDataset"]
    kinds += {"tensorflow": ["tf.data"], "torch": ["DataLoader"], "jax": []}[backend]
    kind = drawn.choice(kinds)
    parts = [part[:count] for part in (X, Y, WEIGHTS)[: 3 if drawn.random() < 0.3 else 2]]
    if kind == "tf.data":
        return tf.data.Dataset.from_tensor_slices(tuple(parts)).batch(BATCH), False
    if kind == "DataLoader":
        return torch.utils.data.DataLoader(list(zip(*parts, strict=True)), batch_size=BATCH), False
    batches = [tuple(part[at : at + BATCH] for part in parts) for at in range(0, count, BATCH)]
    if kind == "generator":
        return (batch for _ in range(9) for batch in batches), True
    return dataset_of(batches.__getitem__, len(batches)), False


def _few(drawn, chance, **options):
    """Each of the options with a chance; a tuple is a choice."""
    return {
        name: drawn.choice(values) for name, values in options.items() if drawn.random() < chance
    }


def _fit(drawn, backend):
    count = drawn.choice(ROWS)
    given = {"verbose": 0, "shuffle": False}
    given |= _few(drawn, 0.3, epochs=(1, 2), initial_epoch=(0, 1), validation_freq=(1, 2))
    if drawn.random() < 0.25:
        given["x"], serves_once = _source(drawn, backend, count)
        given |= _few(drawn, 0.4, steps_per_epoch=(1, 2))
        if serves_once:
            given.setdefault("steps_per_epoch", 2)
    else:
        given |= {"batch_size": BATCH, **_examples(drawn, count)}
        given |= _few(drawn, 0.2, class_weight=CLASS_WEIGHTS, steps_per_epoch=(1, 2))
        given |= _few(drawn, 0.15, validation_split=(0.25, 0.5))
    if drawn.random() < 0.3:
        rows = drawn.choice(ROWS)
        parts = (X[:rows], Y[:rows], WEIGHTS[:rows])
        given["validation_data"] = drawn.choice((parts, parts[:2], list(parts[:2])))
        given["validation_batch_size"] = BATCH
        given |= _few(drawn, 0.2, validation_steps=(1, 2))
    return given


def _evaluate(drawn, backend):
    count = drawn.choice(ROWS)
    given = {"verbose": 0, **_few(drawn, 0.5, return_dict=(True, False))}
    if drawn.random() < 0.3:
        given["x"], serves_once = _source(drawn, backend, count)
        return given | ({"steps": 2} if serves_once else {})
    given |= {"batch_size": BATCH, **_examples(drawn, count)}
    return given | _few(drawn, 0.2, steps=(1, 2))


def _predict(drawn, backend):
    x = _examples(drawn, drawn.choice(ROWS))["x"]
    return {"x": x, "batch_size": BATCH, "verbose": 0, **_few(drawn, 0.2, steps=(1, 2))}


def _train_on_batch(drawn, backend):
    return _test_on_batch(drawn, backend) | _few(drawn, 0.2, class_weight=CLASS_WEIGHTS)


def _test_on_batch(drawn, backend):
    given = _examples(drawn, drawn.choice((4, 3)))
    if given["sample_weight"] is not None and drawn.random() < 0.3:
        given["sample_weight"] = WEIGHTS[: len(given["x"])].tolist()
    return given | _few(drawn, 0.5, return_dict=(True, False))


def _predict_on_batch(drawn, backend):
    return {"x": _examples(drawn, drawn.choice((4, 3)))["x"]}


def _mistake(drawn, method):
    """An argument that Keras refuses, or that the other arguments do not fit."""
    mistakes: list[dict[str, Any]] = [{"unknown": 1}]
    if method in {"fit", "evaluate", "predict"}:
        mistakes += [{"x": None}, {"x": "rows"}, {"batch_size": 0}, {"batch_size": "4"}]
    if method in {"fit", "evaluate"}:
        mistakes += [{"y": Y[:2]}, {"sample_weight": WEIGHTS[:2]}]
    if method == "fit":
        # Plain Keras looks at this one in an epoch only, and we before the first.
        mistakes += [{"validation_data": 3, "initial_epoch": 0, "validation_freq": 1}]
        mistakes += [{"validation_split": 1.5}, {"epochs": 0}]
        mistakes += [{"class_weight": {0: 1.0}, "sample_weight": WEIGHTS[:3]}]
    if method == "train_on_batch":
        mistakes += [{"class_weight": {0: 2.0}, "sample_weight": WEIGHTS[:4]}]
    return drawn.choice(mistakes)
