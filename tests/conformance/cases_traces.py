"""What of kerasdist shows in models and warnings where it should not."""

import gc
import warnings
import weakref

from tests.conformance.lazy import keras
from tests.conformance.models import regression
from tests.conformance.registry import case


@case("models", replicas=(2,))
def model_inside_of_sequential(lab):
    """The Functional model that a Sequential one makes for itself is of Keras's class."""
    from keras.src.models.functional import Functional

    with lab.strategy().scope():
        layers = keras.layers
        given = keras.Sequential([keras.Input((4,)), layers.Dense(1)])
        later = keras.Sequential([keras.Sequential([layers.Dense(2)]), layers.Dense(1)])
        later.build((None, 4))
    for model in given, later, later.layers[0]:
        lab.check(type(model._functional) is Functional, f"received {type(model._functional)}")


@case("models", replicas=(2,))
def a_users_class_goes_with_its_last_model(lab):
    """A class of the user's is kept as long as models of it, as by plain Keras (DEFECTS 21)."""

    def used():
        class Own(keras.Model):
            def __init__(self):
                super().__init__()
                self.dense = keras.layers.Dense(1)

            def call(self, x):
                return self.dense(x)

        with lab.strategy().scope():
            model = Own()
            model.compile("sgd", "mse")
        model.fit(*regression(4), verbose=0)
        return weakref.ref(Own), weakref.ref(type(model)), weakref.ref(model)

    references = used()
    keras.utils.clear_session(free_memory=False)
    gc.collect()
    lab.equal([None] * 3, [one() for one in references])


@case("models", replicas=(3,))
def warnings_of_keras(lab):
    """A warning of Keras's comes once, and names the line that called Keras, or Keras's own."""
    x, y = regression(7)

    def batches():
        while True:
            yield x, y

    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        with lab.strategy().scope():
            inputs = {name: keras.Input((4,), name=name) for name in ("one", "other")}
            joined = keras.layers.Concatenate()(list(inputs.values()))
            model = keras.Model(inputs, keras.layers.Dense(1, name="last")(joined))
            keras.layers.Dense(1, input_shape=(4,))
            model.compile("sgd", "mse")
            single = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
            single.compile("sgd", "mse")
        model.fit([x, x], y, batch_size=4, verbose=0)
        single.fit(batches(), steps_per_epoch=1, shuffle=True, verbose=0)
    found = [
        (start, one.filename.replace("\\", "/"))
        for one in given
        for start in ("The structure of `inputs`", "Do not pass an `input_shape`", "`shuffle=True`")
        if str(one.message).startswith(start)
    ]
    where = [next(end for end in ENDS if name.endswith(end)) for _, name in found]
    structures = [start for start, _ in found if start.startswith("The structure")]
    lab.check(len(structures) == 1, f"received {found}")
    lab.check(where == ["keras/src/layers/core/dense.py", *where[1:]], f"received {found}")
    lab.check(found[-1][1].endswith("tests/conformance/cases_traces.py"), f"received {found}")
    lab.check(len(found) == len(structures) + 2, f"received {found}")


ENDS = ("keras/src/layers/core/dense.py", "keras/src/models/functional.py", "/cases_traces.py")
