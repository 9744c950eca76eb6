"""What of kerasdist shows in models and warnings where it should not."""

import gc
import weakref

from tests.conformance.lazy import keras
from tests.conformance.models import regression
from tests.conformance.registry import case


@case("models", replicas=(2,))
def a_users_class_goes_with_its_last_model(lab):
    """A user's class is freed with its last model, as in plain Keras (DEFECTS 21)."""

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
