"""Strategies that place variables otherwise: one device for all of them, or a part on each."""

import numpy as np

from tests.conformance.actions import evaluate, fit, predict
from tests.conformance.lazy import kd, keras
from tests.conformance.models import FEATURES, regression, stack
from tests.conformance.registry import REPLICAS, case
from tests.environment import everything

N, BATCH = 11, 4


def wide():
    """Normalization, dropout, clipping: on JAX all of it equals one device."""
    layers = keras.layers
    optimizer = keras.optimizers.Adam(0.01, global_clipnorm=0.5)
    return stack(
        [
            layers.Dense(8, activation="tanh", name="wide"),
            layers.BatchNormalization(),
            layers.Dropout(0.3),
            layers.Dense(4, activation="tanh", name="narrow"),
            layers.Dense(1),
        ],
        optimizer,
        metrics=["mae", keras.metrics.R2Score()],
    )


def all_of_it():
    x, y = regression(N)
    return [
        fit(x, y, batch_size=BATCH, epochs=2, validation_data=(x[:5], y[:5])),
        evaluate(x, y, batch_size=BATCH),
        predict(x, batch_size=BATCH),
    ]


@case("strategies", replicas=REPLICAS)
def central_storage(lab):
    """`CentralStorageStrategy`: variables on one device; BatchNormalization, clipping, ragged."""
    strategy, alone = (
        kd.CentralStorageStrategy(devices, "cpu:0") for devices in (lab.devices, lab.devices[-1:])
    )

    def build():
        layers = keras.layers
        # Without a bias before the normalization, whose gradient would be rounding alone.
        first = layers.Dense(6, use_bias=False)
        optimizer = keras.optimizers.Adam(0.01, clipnorm=0.1)
        normalized = [first, layers.BatchNormalization(), layers.Dense(1)]
        model = stack(normalized, optimizer, metrics=["mae"])
        for layer in (first, normalized[-1]):  # torch draws other numbers on a GPU than on a CPU
            layer.kernel.assign(np.random.default_rng(0).normal(size=layer.kernel.shape))
        return model

    lab.same(build, *all_of_it(), strategy=alone)
    model = lab.same(build, *all_of_it(), strategy=strategy)
    lab.equal(1, len(strategy.extended.parameter_devices))
    lab.equal(lab.replicas, len(strategy.extended.worker_devices))
    if lab.backend == "jax":
        held = {str(variable.value.devices()) for variable in model.variables}
        lab.equal(1, len(held))


def split(layout):
    replicas, cores = layout
    assignment = kd.DeviceAssignment.build(replicas, (cores,))
    strategy = kd.TPUStrategy(experimental_device_assignment=assignment)
    strategy.split_variables({"wide.*kernel": (1, cores), "narrow.*kernel": (cores, 1)})
    return strategy


@case("strategies", backends=("jax",), replicas=(2, 3))
def split_variables(lab):
    """`TPUStrategy.split_variables`: no device holds a cut variable, or its moments, whole.

    The model gives and takes whole weights.
    """
    for layout in ((2, 2), (1, 4), (1, 2))[: None if everything() else 2]:
        model = lab.same(wide, *all_of_it(), strategy=split(layout), plain_key="split")
        for variable in [*model.variables, *model.optimizer.variables]:
            if "wide_kernel" in variable.path.replace("/", "_"):
                here = variable.value.addressable_data(0).shape
                lab.equal((FEATURES, 8 // layout[1]), here)
    x, _ = regression(N)
    twin = wide()
    for factor in (1.0, 0.5):
        model.set_weights([factor * weight for weight in model.get_weights()])
        twin.set_weights(model.get_weights())
        lab.equal(model.predict(x, verbose=0), twin.predict(x, verbose=0))


@case("strategies", backends=("jax",), replicas=(2, 4))
def logical_devices_in_a_model(lab):
    """`experimental_split_to_logical_devices` and its relatives change where, not what."""
    strategy = split((2, 2))

    class Placed(keras.layers.Layer):
        def call(self, x):
            if not kd.has_strategy() and not self.placed:
                return x
            x = strategy.experimental_split_to_logical_devices(x, (1, 2))
            x = strategy.experimental_replicate_to_logical_devices(x)
            return strategy.experimental_assign_to_logical_device(x, 1)

    def build():
        layer = Placed()
        layer.placed = kd.has_strategy()
        return stack([layer, keras.layers.Dense(1)], "sgd")

    lab.same(build, *all_of_it(), strategy=strategy)
    x = np.zeros((4, 6), "float32")
    for shards, gist in (
        ((2,), "each of the 2 axes"),
        ((2, 2), "multiply to"),
        ((1, 3), "multiply"),
        ((-1, -2), "multiply"),
    ):
        with lab.raises(ValueError, gist):
            strategy.experimental_split_to_logical_devices(x, shards)
    with lab.raises(ValueError, r"cut into equal shards.*uneven along \[1\]"):
        strategy.experimental_split_to_logical_devices(x[:, :5], (1, 2))
    with lab.raises(ValueError, "logical_device_id=2"):
        strategy.experimental_assign_to_logical_device(x, 2)
    with lab.raises(ValueError, "multiply to the number of logical devices"):
        strategy.split_variables({"kernel": (3, 1)})
    with lab.raises(kd.errors.DeviceError, "Expected 10 devices"):
        kd.TPUStrategy(experimental_device_assignment=kd.DeviceAssignment.build(5, (2,)))


@case("strategies", backends=("torch",))
def tpus_need_torch_xla(lab):
    """`TPUStrategy` on torch says what is missing."""
    with lab.raises(kd.errors.UnsupportedError, "torch_xla"):
        kd.TPUStrategy()
