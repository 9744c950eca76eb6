"""Calls of a compiled model, drawn from a seed: what users give to `fit` and its kin, and mistakes.

Few shapes only: each new one is traced or compiled, for the model in the scope and for the other.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.conformance.lazy import keras

FEATURES, CLASSES, BATCH = 4, 3, 4
ROWS = (8, 6, 3)

_DATA = np.random.default_rng(15)
X = _DATA.normal(size=(8, FEATURES)).astype("float32")
Y = np.array([0, 2, 1, 1, 0, 2, 2, 0], "int32")
WEIGHTS = np.array([0.5, 0.0, 2.0, 1.0, 1.5, 0.0, 0.3, 1.0], "float32")
CLASS_WEIGHTS = ({0: 0.5, 1: 2.0, 2: 1.0}, {0: 1.0, 1: 0.0, 2: 3.0}, {1: 2})


@dataclass(frozen=True)
class Call:
    """A method's name and a function that makes its arguments afresh: generators serve once."""

    method: str
    arguments: Callable[[], dict[str, Any]]
    text: str

    def on(self, model, *, plain: bool = False) -> Any:
        given = self.arguments()
        if plain and isinstance(given.get("sample_weight"), list):
            # Of a list Keras gives the loss all numbers, and weighted metrics the first (3.15.1).
            given["sample_weight"] = np.array(given["sample_weight"], "float32")
        return getattr(model, self.method)(**given)


def calls(backend: str, number: int, seed: int = 15) -> Iterator[Call]:
    drawn = random.Random(seed)
    for _ in range(number):
        make = drawn.choices(
            (_fit, _evaluate, _predict, _train_on_batch, _test_on_batch, _predict_on_batch),
            (6, 3, 2, 5, 3, 1),
        )[0]
        method, given = make(drawn, backend)
        if drawn.random() < 0.12:
            given = {**given, **_mistake(drawn, method)}
        text = f"{method}({', '.join(f'{name}={value}' for name, value in given.items())})"
        yield Call(method, lambda given=given: {k: _made(v) for k, v in given.items()}, text)


@dataclass(frozen=True)
class Rows:
    """An argument: the first rows of an array, in a container."""

    name: str
    count: int
    container: str = "array"

    def made(self) -> Any:
        array = {"x": X, "y": Y, "weights": WEIGHTS}[self.name][: self.count]
        match self.container:
            case "array":
                return array.copy()
            case "list":
                return array.tolist()
            case "tensor":
                return keras.ops.convert_to_tensor(array)
            case "float64" | "float16" | "int64":
                return array.astype(self.container)
        raise ValueError(self.container)


@dataclass(frozen=True)
class Source:
    """An argument: batches of rows from something else than arrays."""

    kind: str
    count: int
    weighted: bool

    def made(self) -> Any:
        parts = (X, Y, WEIGHTS) if self.weighted else (X, Y)
        batches = [
            tuple(part[start : min(start + BATCH, self.count)] for part in parts)
            for start in range(0, self.count, BATCH)
        ]
        match self.kind:
            case "generator":
                return (batch for _ in range(9) for batch in batches)
            case "PyDataset":
                return _pydataset(batches)
            case "tf.data":
                import tensorflow as tf

                rows = tuple(part[: self.count] for part in parts)
                return tf.data.Dataset.from_tensor_slices(rows).batch(BATCH)
            case "DataLoader":
                from torch.utils.data import DataLoader

                rows = list(zip(*(part[: self.count] for part in parts), strict=True))
                return DataLoader(rows, batch_size=BATCH)
        raise ValueError(self.kind)


def _pydataset(batches):
    class Batches(keras.utils.PyDataset):
        def __len__(self):
            return len(batches)

        def __getitem__(self, index):
            return batches[index]

    return Batches()


def _made(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return type(value)(map(_made, value))
    return value.made() if isinstance(value, (Rows, Source)) else value


def _x(drawn, count):
    return Rows("x", count, drawn.choice(("array",) * 4 + ("tensor", "float64", "float16")))


def _y(drawn, x):
    """Of any container; wide types go with wide examples, as each pair is one more to trace."""
    wide = ("int64",) if x.container == "float64" else ("array", "tensor")
    return Rows("y", x.count, drawn.choice(wide))


def _weights(drawn, x):
    if drawn.random() < 0.6:
        return None
    wide = ("float64",) if x.container == "float64" else ("array", "array", "tensor")
    return Rows("weights", x.count, drawn.choice(wide))


def _source(drawn, backend, count):
    kinds = ["generator", "PyDataset"]
    kinds += {"tensorflow": ["tf.data"], "torch": ["DataLoader"], "jax": []}[backend]
    return Source(drawn.choice(kinds), count, drawn.random() < 0.3)


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
        given |= {"x": _source(drawn, backend, count)}
        given |= _few(drawn, 0.4, steps_per_epoch=(1, 2))
        if given["x"].kind == "generator":
            given.setdefault("steps_per_epoch", 2)
    else:
        x = _x(drawn, count)
        given |= {"x": x, "y": _y(drawn, x), "batch_size": BATCH}
        given["sample_weight"] = _weights(drawn, x)
        given |= _few(drawn, 0.2, class_weight=CLASS_WEIGHTS, steps_per_epoch=(1, 2))
        given |= _few(drawn, 0.15, validation_split=(0.25, 0.5))
    if drawn.random() < 0.3:
        rows = drawn.choice(ROWS)
        parts = (Rows("x", rows), Rows("y", rows), Rows("weights", rows))
        given["validation_data"] = drawn.choice((parts, parts[:2], list(parts[:2])))
        given["validation_batch_size"] = BATCH
        given |= _few(drawn, 0.2, validation_steps=(1, 2))
    return "fit", given


def _evaluate(drawn, backend):
    count = drawn.choice(ROWS)
    given = {"verbose": 0, **_few(drawn, 0.5, return_dict=(True, False))}
    if drawn.random() < 0.3:
        source = _source(drawn, backend, count)
        given |= {"x": source, **({"steps": 2} if source.kind == "generator" else {})}
    else:
        x = _x(drawn, count)
        given |= {"x": x, "y": _y(drawn, x), "batch_size": BATCH}
        given["sample_weight"] = _weights(drawn, x)
        given |= _few(drawn, 0.2, steps=(1, 2))
    return "evaluate", given


def _predict(drawn, backend):
    given = {"x": _x(drawn, drawn.choice(ROWS)), "batch_size": BATCH, "verbose": 0}
    return "predict", given | _few(drawn, 0.2, steps=(1, 2))


def _on_batch(drawn):
    x = _x(drawn, drawn.choice((4, 3)))
    given = {"x": x, "y": _y(drawn, x)}
    weights = _weights(drawn, x)
    if weights is not None and drawn.random() < 0.3:
        weights = Rows("weights", x.count, "list")
    given["sample_weight"] = weights
    return given | _few(drawn, 0.5, return_dict=(True, False))


def _train_on_batch(drawn, backend):
    return "train_on_batch", _on_batch(drawn) | _few(drawn, 0.2, class_weight=CLASS_WEIGHTS)


def _test_on_batch(drawn, backend):
    return "test_on_batch", _on_batch(drawn)


def _predict_on_batch(drawn, backend):
    return "predict_on_batch", {"x": _x(drawn, drawn.choice((4, 3)))}


def _mistake(drawn, method):
    """An argument that Keras refuses, or that the other arguments do not fit."""
    mistakes = [{"unknown": 1}]
    if method in {"fit", "evaluate", "predict"}:
        mistakes += [{"x": None}, {"x": "rows"}, {"batch_size": 0}, {"batch_size": "4"}]
    if method in {"fit", "evaluate"}:
        mistakes += [{"y": Rows("y", 2)}, {"sample_weight": Rows("weights", 2)}]
    if method == "fit":
        # Plain Keras looks at this one in an epoch only, and we before the first.
        mistakes += [{"validation_data": 3, "initial_epoch": 0, "validation_freq": 1}]
        mistakes += [{"validation_split": 1.5}, {"epochs": 0}]
        mistakes += [{"class_weight": {0: 1.0}, "sample_weight": Rows("weights", 3)}]
    if method == "train_on_batch":
        mistakes += [{"class_weight": {0: 2.0}, "sample_weight": Rows("weights", 4)}]
    return drawn.choice(mistakes)
