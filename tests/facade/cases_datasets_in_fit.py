"""Distributed datasets in `fit`, `evaluate` and `predict`."""

import functools

from tests.conformance.lazy import kd, keras, tf
from tests.facade.case import case
from tests.facade.lab import FLOAT32, fresh
from tests.facade.sources import SOURCES, Sequence, X, Y, pairs


def trained(data, strategy, validation=None):
    fresh()
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(1e-3), "mean_squared_error", metrics=["mae"])
    history = model.fit(data, epochs=2, verbose=0, shuffle=False, validation_data=validation)
    evaluated = model.evaluate(data, verbose=0)
    predicted = model.predict(data, verbose=0)
    return history.history, evaluated, predicted, model.get_weights()


@functools.cache
def plainly_trained():
    """What plain Keras gives for the batches that most cases have."""
    return trained(Sequence(), kd.get_strategy(), Sequence())


FITTED = ("list", "PyDataset", "tf_data", "DataLoader", "rows")


def fitting(name):
    def check(lab):
        strategy = lab.strategy()
        make, _ = SOURCES[name]
        data = strategy.experimental_distribute_dataset(make())
        lab.equal(plainly_trained(), trained(data, strategy, data), FLOAT32)

    return check


for _name in FITTED:
    case(
        replicas=(2, 3),
        like="" if _name in ("list", "tf_data") else "datasets_in_fit.fit_list",
        name=f"fit_{_name}",
        title=f"`fit`, `evaluate` and `predict` take the distributed source `{_name}`",
    )(fitting(_name))


@case
def fit_of_one_replica(lab):
    """On one device or without a strategy, distributing a dataset does not change it."""
    single = kd.OneDeviceStrategy(lab.devices[0])
    data = single.distribute_dataset(tuple(pairs()))
    lab.equal(pairs(), list(data))
    data = single.distribute_dataset(Sequence())
    lab.equal(plainly_trained(), trained(data, single, data), FLOAT32)
    plain = kd.get_strategy()
    data = plain.distribute_dataset(pairs())
    lab.equal(plainly_trained(), trained(data, plain, data), FLOAT32)


@case(replicas=(2, 3))
def fit_of_pipelines(lab, strategy):
    """In `fit`, the next batches of all replicas together are one global batch."""
    small = [(X[i : i + 2], Y[i : i + 2]) for i in range(0, 10, 2)]
    size = 2 * lab.replicas
    rounds = [(X[i : i + size], Y[i : i + size]) for i in range(0, 10, size)]
    plain = trained(Sequence(rounds), kd.get_strategy())
    for pipeline in (small, tf.data.Dataset.from_tensor_slices((X, Y)).batch(2)):
        data = strategy.distribute_datasets_from_function(lambda _, made=pipeline: made)
        lab.equal(plain, trained(data, strategy), FLOAT32)


@case
def fit_with_targets_beside(lab, strategy):
    """`fit` on a distributed dataset refuses `y`, `sample_weight` and `class_weight`."""
    data = strategy.distribute_dataset([X[:4]])
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    for name, value in (("y", Y[:4]), ("sample_weight", X[:4, 0]), ("class_weight", {0: 2.0})):
        with lab.raises(kd.errors.InputError, f"Expected nothing beside.*Received: {name}"):
            model.fit(data, **{name: value}, verbose=0)
