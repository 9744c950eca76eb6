"""Which strategy, and which replica, the code of a model sees while Keras's loops run it."""

import numpy as np

from tests.conformance.lazy import kd, keras, ops
from tests.facade.case import case


def observed(strategy, look):
    """Trains and asks a model of this strategy, whose code calls `look` with its place."""

    class Layer(keras.layers.Layer):
        def build(self, shape):
            look("build")
            self.kernel = self.add_weight(shape=(shape[-1], 1))

        def call(self, x):
            look("layer")
            return ops.matmul(x, self.kernel)

    class Loss(keras.losses.Loss):
        def call(self, y_true, y_pred):
            look("loss")
            return ops.mean(ops.square(y_true - y_pred), axis=-1)

    class Count(keras.metrics.Metric):
        def __init__(self):
            super().__init__(name="count")
            self.total = self.add_weight(shape=(), initializer="zeros")

        def update_state(self, y_true, y_pred, sample_weight=None):
            look("update_state")
            self.total.assign_add(ops.cast(ops.shape(y_pred)[0], "float32"))

        def result(self):
            look("result")
            return self.total + 0.0

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.layer = Layer()

        def call(self, x):
            look("call")
            return self.layer(x)

        def train_step(self, *given):
            look("train_step")
            return super().train_step(*given)

        def test_step(self, *given):
            look("test_step")
            return super().test_step(*given)

        def predict_step(self, *given):
            look("predict_step")
            return super().predict_step(*given)

    x, y = np.ones((8, 3), "float32"), np.ones((8, 1), "float32")
    with strategy.scope():
        model, other = Model(), Model()
        for one in (model, other):
            one.compile("sgd", Loss(), metrics=[Count()])
    history = model.fit(x, y, batch_size=4, verbose=0)  # builds the model
    other.predict(x, verbose=0)  # likewise
    for call in (model.evaluate, model.train_on_batch, model.test_on_batch):
        call(x, y)
    model.predict_on_batch(x)
    return history.history["count"]


PLACES = "build call layer loss predict_step result test_step train_step update_state"


def strategies(lab):
    unchecked = {"check": "off"}  # the check of the first batch takes a step on one device
    yield kd.OneDeviceStrategy("cpu:1")
    yield kd.MirroredStrategy(lab.devices[:1], **unchecked)
    yield kd.MirroredStrategy(lab.devices, **unchecked)
    yield kd.CentralStorageStrategy(lab.devices, **unchecked)
    yield kd.MultiWorkerMirroredStrategy(devices=lab.devices[:1], **unchecked)


@case
def strategy_of_a_models_code(lab):
    """Code of a model (layers, steps, losses, metrics) sees the model's strategy as a replica."""
    for strategy in strategies(lab):
        seen, n = {}, strategy.num_replicas_in_sync

        def look(place, seen=seen, strategy=strategy, n=n):
            here = kd.get_replica_context()
            is_right = (
                kd.get_strategy() is strategy and kd.has_strategy(),
                not kd.in_cross_replica_context() and here.strategy is strategy,
                here is not None and here.num_replicas_in_sync == n,
            )
            seen.setdefault(place, set()).add(is_right)

        lab.equal([8.0], observed(strategy, look))
        lab.equal(PLACES.split(), sorted(seen))
        wrong = {place for place, found in seen.items() if found != {(True, True, True)}}
        lab.check(not wrong, f"{strategy}: another one is in force in {wrong}")
        lab.check(not kd.has_strategy(), "and none after it")


@case
def losses_of_tf_distribute_in_a_models_code(lab):
    """A `compute_loss` of the user may divide by the number of replicas, as for tf.distribute."""
    strategy = lab.strategy(check="off")

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(1, kernel_initializer="ones", use_bias=False)

        def call(self, x):
            return self.dense(x)

        def compute_loss(self, x=None, y=None, y_pred=None, *given, **options):
            return kd.compute_average_loss(ops.square(y - y_pred)[:, 0])

    with strategy.scope():
        model = Model()
        model.compile(keras.optimizers.SGD(1.0))
    x, y = np.ones((4, 1), "float32"), np.zeros((4, 1), "float32")
    model.fit(x, y, batch_size=4, verbose=0)
    lab.equal([[1.0 - 2.0 / lab.replicas]], model.dense.kernel)
