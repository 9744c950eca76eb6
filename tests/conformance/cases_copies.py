"""Copies of a model: of its class, and of the strategy in whose scope they are made, or of none."""

import contextlib
import copy
import dataclasses
import pickle
import tempfile
from typing import Generic, TypeVar

import numpy as np

from tests.conformance.compare import FLOAT32
from tests.conformance.lazy import kd, keras
from tests.conformance.models import regression
from tests.conformance.registry import case

N, BATCH = 11, 4
X, Y = regression(N)
T = TypeVar("T")


def classes():
    """Of users: a subclass, with a mixin before it, generic, and a dataclass."""

    @keras.saving.register_keras_serializable("copies")
    class Own(keras.Model):
        def __init__(self, units=3, **options):
            super().__init__(**options)
            self.units = units
            self.hidden = keras.layers.Dense(units, activation="tanh")
            self.out = keras.layers.Dense(1)

        def call(self, x):
            return self.out(self.hidden(x))

        def get_config(self):
            return {**super().get_config(), "units": self.units}

        def twin(self):
            return self.__class__(self.units)

    class Doubles:
        def call(self, x):
            return 2 * super().call(x)

    @keras.saving.register_keras_serializable("copies")
    class Mixed(Doubles, Own):
        pass

    @keras.saving.register_keras_serializable("copies")
    class Typed(Own, Generic[T]):
        pass

    @keras.saving.register_keras_serializable("copies")
    @dataclasses.dataclass(eq=False)
    class Data(keras.Model):
        units: int = 3

        def __post_init__(self):
            super().__init__()
            self.hidden = keras.layers.Dense(self.units, activation="tanh")
            self.out = keras.layers.Dense(1)

        def call(self, x):
            return self.out(self.hidden(x))

        def get_config(self):
            return {"units": self.units}

        def twin(self):
            return self.__class__(self.units)

    for one in (Own, Mixed, Typed, Data):  # as if they stood in the module, where pickle looks
        one.__qualname__ = one.__name__
        globals()[one.__name__] = one
    return Own, Mixed, Typed, Data


def sequential():
    return keras.Sequential([keras.Input((X.shape[1],)), keras.layers.Dense(3)])


def functional():
    image = keras.Input((X.shape[1],))
    return keras.Model(image, keras.layers.Dense(1)(keras.layers.Dense(3)(image)))


def by_file(model):
    with tempfile.TemporaryDirectory() as folder:
        model.save(f"{folder}/m.keras")
        return keras.models.load_model(f"{folder}/m.keras")


WAYS = {
    "from_config": lambda model: type(model).from_config(model.get_config()),
    "__class__": lambda model: model.twin(),
    "clone_model": lambda model: keras.models.clone_model(model),  # noqa: PLW0108  keras is late
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "by_file": by_file,
}


def trained(model, weights=None):
    """The weights of a model after some steps; the first weights are given."""
    model(X[:1])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    if weights is not None:
        model.set_weights(weights)
    model.fit(X, Y, batch_size=BATCH, shuffle=False, verbose=0)
    return model.get_weights()


@case("models", replicas=(2,))
def copies_in_every_way(lab):
    """A copy is of its model's class, trains as one device, and is of the scope that it is in."""
    from kerasdist.backends.base.model_trainer import trainer_of

    strategy, other = lab.strategy(), kd.OneDeviceStrategy(lab.devices[0])
    makers = [sequential, functional, *classes()]
    for maker in makers:
        with strategy.scope():
            model = maker()
        plain = maker()
        first = trained(plain) and plain.get_weights()
        expected = trained(maker(), first)
        for used in (False, True):  # before and after it has been trained
            if used:
                trained(model, first)
            else:
                model(X[:1])
            for name, way in WAYS.items():
                if name == "__class__" and maker in (sequential, functional):
                    continue
                if name == "clone_model" and maker not in (sequential, functional):
                    continue  # plain Keras clones no subclass by itself
                for scope in (None, strategy, other):
                    told = f"{name} of {model.name}, {used=}, {scope}"
                    with scope.scope() if scope else contextlib.nullcontext():
                        made = way(model)
                    lab.check(type(made) is type(model), told)
                    trainer = trainer_of(made)
                    lab.check((trainer and trainer.strategy) is scope, f"{told}: {trainer}")
                    # Elsewhere a first step takes long. A shallow copy shares the other's layers.
                    is_one = scope is strategy and used and name in ("__class__", "deepcopy")
                    if name == "copy" or not (lab.backend == "torch" or is_one):
                        continue
                    received = trained(made, first)
                    lab.check(not np.array_equal(received[0], first[0]), told)
                    lab.equal(expected, received, FLOAT32)
