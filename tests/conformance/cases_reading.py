"""Variables that are made in a scope read as numbers, as in plain Keras."""

import numpy as np

from tests.conformance.actions import quiet_fit
from tests.conformance.lab import logged
from tests.conformance.lazy import kd, keras
from tests.conformance.models import compiled, regression
from tests.conformance.registry import case

N, BATCH = 11, 4


def readings(model):
    """Every way in which code turns the variables of a model into numbers."""
    rate, count = model.optimizer.learning_rate, model.optimizer.iterations
    kernel = model.layers[0].kernel
    tracked = [v for metric in model.metrics for v in metric.variables]
    to_numpy = keras.ops.convert_to_numpy
    found = [
        float(rate),
        float(rate.value),
        int(count),
        int(count.value),
        float(count),
        bool(count > 0),
        bool(count.value),
        f"{float(rate):.3f} {int(count):d}",
        list(range(int(count))),
        float(round(rate, 3)),
        bool(rate < 1.0),
        float(rate * 2 + 1),
        np.array(rate).item(),
        np.array(to_numpy(rate.value)).item(),
        np.asarray(to_numpy(kernel.value)),
        np.asarray(to_numpy(kernel)),
        float(kernel[0, 0]),
        [np.asarray(to_numpy(one)) for one in tracked],
        [float(one.value) for one in tracked if len(one.shape) == 0],
    ]
    if keras.backend.backend() != "torch":  # whose own value wants `detach`
        found += [np.array(rate.value).item(), complex(rate.value).real]
        found += [np.array(kernel.value, dtype="float64")]
    return found


def model():
    layers = [keras.Input((4,)), keras.layers.Dense(1, kernel_initializer="ones")]
    return compiled(keras.Sequential(layers), keras.optimizers.Adam(0.01), "mse", metrics=["mae"])


def fit_and_read(model):
    """Reads after each batch of `fit`, in a callback, and once more after it."""
    found = []

    class Reads(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            found.append(readings(self.model))

    x, y = regression(N)
    quiet_fit(x, y, batch_size=BATCH, callbacks=[Reads()])(model)
    return [*found, readings(model)]


@case("reading variables")
def in_callbacks_and_after(lab):
    """`float(learning_rate)`, `int(iterations)`, `np.array(v.value)` in and after `fit`."""
    lab.same(model, fit_and_read)


@case("reading variables", backends=("tensorflow",))
def advice_comes_once(lab):
    """With `run_eagerly=True` TensorFlow's advice against eager replicas is logged once at most."""
    made = lab.made(lambda: compiled(model(), "sgd", "mse", run_eagerly=True))
    with logged(name="tensorflow") as lines:
        made.fit(*regression(N), batch_size=BATCH, verbose=0)
    lab.check(sum("eagerly" in line for line in lines) <= 1, f"one line at most, not {lines}")


@case("reading variables", replicas=(2,))
def central_storage(lab):
    """Variables that one device holds for all replicas."""
    strategy = kd.CentralStorageStrategy(lab.devices, parameter_device="cpu:0")
    lab.same(model, fit_and_read, strategy=strategy)
