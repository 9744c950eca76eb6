"""What `keras_compat` finds by what is public equals what Keras keeps."""

from types import SimpleNamespace

import keras
import pytest
from keras import layers

from kerasdist import keras_compat
from kerasdist.keras_compat import models, thread_state
from kerasdist.training import binding, metrics


class Nest(layers.Layer):
    def __init__(self):
        super().__init__()
        self.one = layers.Dense(2)
        self.several = [layers.Dense(3), {"x": layers.Dense(1)}]
        self.pair = (layers.Dense(5), layers.Dropout(0.1))
        self.seen = keras.metrics.Mean()


class Deep(keras.Model):
    def __init__(self):
        super().__init__()
        self.nest = Nest()
        self.wired = functional()
        self.both = layers.Bidirectional(layers.LSTM(3))
        self.again = self.nest.one


def functional():
    given, dense = keras.Input((4,)), layers.Dense(4)
    return keras.Model(given, layers.Add()([dense(dense(given)), layers.Dropout(0.1)(given) * 2.0]))


def sequential():
    return keras.Sequential([layers.Dense(2), Nest()])


@pytest.mark.parametrize("build", [functional, sequential, Deep])
def test_layers_are_found_by_what_is_public(build):
    model = build()
    kept = keras_compat.flat_layers(model)
    assert len(kept) > 2
    assert models._walk_layers(model) == kept


def test_metrics_are_found_among_attributes():
    nest = Nest()
    assert models._held_in((nest,), keras.metrics.Metric) == [nest.seen]


def test_a_models_calls():
    given = keras.Input((4,))
    shared = layers.Dense(4)
    other = shared(shared(given))  # these calls belong to no model
    model = keras.Model(given, shared(layers.Dense(4)(given)))
    found = {type(operation).__name__: calls for operation, calls in keras_compat.wiring(model)}
    numbers = [type(one).__name__ for one in model.operations]
    assert len(other.shape) == 2
    assert numbers == ["InputLayer", "Dense", "Dense"]
    assert [calls for _, calls in keras_compat.wiring(model)][1:] == [[[[0, 0, 0]]], [[[1, 0, 0]]]]
    assert found["InputLayer"] == [[]]


@pytest.mark.parametrize(
    ("name", "is_default"),
    [("dense", True), ("dense_12", True), ("functional_3", True), ("my_dense", False)],
)
def test_names_that_keras_gives(name, is_default):
    assert keras_compat.is_default_name(name, layers.Dense) == is_default


def test_names_of_classes_with_several_words():
    assert keras_compat.is_default_name(layers.BatchNormalization().name, layers.BatchNormalization)
    assert keras_compat.is_default_name("conv2d_transpose_1", layers.Conv2DTranspose)


def test_events_that_a_callback_overrides():
    class OfEpochs(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            pass

    assert keras_compat.overrides(OfEpochs(), ["on_epoch_end"])
    assert not keras_compat.overrides(OfEpochs(), keras_compat.BATCH_EVENTS)
    set_on_it = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: None)
    assert keras_compat.overrides(set_on_it, keras_compat.BATCH_EVENTS)


def test_numbers_of_logs():
    logs = {"b": keras.ops.ones(()), "a": {"c": 2}, "text": "x"}
    assert keras_compat.numbers_of(logs) == {"c": 2.0, "b": 1.0, "text": "x"}


@pytest.mark.parametrize("is_known", [True, False])
def test_scopes(monkeypatch, is_known):
    """Also where the name is gone under which Keras keeps the open one."""
    name = thread_state.name_of_scope() if is_known else None
    monkeypatch.setattr(thread_state, "name_of_scope", lambda: name)
    keras.utils.clear_session()  # makes the state of threads anew
    assert keras_compat.get_stateless_scope() is None
    with keras.StatelessScope() as outer:
        assert keras_compat.get_stateless_scope() is outer
        with keras_compat.outside_stateless_scopes():
            assert keras_compat.get_stateless_scope() is None
        assert keras_compat.get_stateless_scope() is outer
    assert keras_compat.get_stateless_scope() is None


def test_what_an_optimizer_keeps_of_recreated_variables():
    """By the keys of native variables: where slots are, and what does not decay."""
    keys = {"old a": "new a", "old b": "new b"}
    optimizer = SimpleNamespace(
        _trainable_variables=["old a", "old b"],
        _trainable_variables_indices={"old a": 0, "old b": 1},
        _var_key=keys.get,
        _weight_decay_by_var_key={"old a": True, "old b": False},
        _exclude_from_weight_decay={"old b"},
        other={"name": 1},
    )
    keras_compat.index_variables(optimizer)
    assert optimizer._trainable_variables_indices == {"new a": 0, "new b": 1}
    assert optimizer._weight_decay_by_var_key == {"new a": True, "new b": False}
    assert optimizer._exclude_from_weight_decay == {"new b"}
    assert optimizer.other == {"name": 1}


class OfOwn(keras.metrics.Mean):
    pass


@pytest.mark.parametrize(
    ("make", "behind"),
    [
        (keras.metrics.Mean, ["ReplicatedMean"]),
        (keras.metrics.Sum, ["ReplicatedSum"]),
        (OfOwn, ["ReplicatedMean"]),
        (keras.metrics.RootMeanSquaredError, ["ReplicatedMean"]),
        (lambda: keras.metrics.MeanMetricWrapper(abs), ["ReplicatedWrapper", "ReplicatedMean"]),
        (keras.metrics.CosineSimilarity, ["ReplicatedWrapper", "ReplicatedMean"]),
        (keras.metrics.MeanAbsoluteError, ["ReplicatedMean"]),
        (keras.metrics.AUC, []),
    ],
)
def test_a_bound_metric(make, behind):
    """It has a class of ours before each of Keras's whose updates a replica shares."""
    metric = make()
    own = type(metric)
    metrics._bind(metric)
    kinds = type(metric).__mro__
    names = [kind.__name__ for kind in kinds]
    assert metric.__class__ is own  # by which Keras saves it
    assert isinstance(metric, own)
    assert names[1] == "ReplicatedMetric"
    assert [name for name in names if name.startswith("Replicated")][1:] == behind
    for name in behind:
        at = names.index(name)
        assert kinds[at + 1] in kinds[at].__bases__
    bound = type(metric)
    metrics._bind(metric)  # once is enough
    assert type(metric) is bound
    other = make()
    metrics._bind(other)
    assert type(other) is bound
    binding.bind(metric, metrics.GlobalBatchMetric)
    assert type(metric).__mro__[1] is metrics.GlobalBatchMetric
    assert metric.__class__ is own


def test_functions_of_keras_and_of_users_have_classes_of_their_own():
    """Of the same class of Keras: one needs no look at what it computes."""
    of_keras, of_user = keras.metrics.MeanSquaredError(), keras.metrics.MeanMetricWrapper(abs)
    metrics._bind(of_keras)
    metrics._bind(of_user)
    assert isinstance(of_user, metrics.ReplicatedWrapper)
    assert not isinstance(of_keras, metrics.ReplicatedWrapper)
