"""Replicas of one process on PyTorch, where a replica may end its step before the others begin."""

import threading
from functools import partial

from tests.conformance.actions import evaluate, fit
from tests.conformance.lazy import kd, keras, torch
from tests.conformance.models import regression, stack
from tests.conformance.registry import REPLICAS, case

X, Y = regression(25)
TRAIN = fit(X, Y, batch_size=6)


def of_rows(y_true, y_pred):
    return keras.ops.abs(y_true - y_pred)


def noting(seen):
    """A layer that notes in which threads it is called."""

    class Noting(keras.layers.Layer):
        def call(self, inputs):
            seen.append(threading.get_ident())
            return inputs

    return Noting()


def meeting(ranks=()):
    """A layer that sums over the replicas while it is `on`; with `ranks`, on these alone."""

    class Meeting(keras.layers.Layer):
        on = False

        def call(self, inputs):
            context = kd.get_replica_context()
            if not self.on or (ranks and context.replica_id_in_sync_group not in ranks):
                return inputs
            return inputs + 0.0 * context.all_reduce("sum", keras.ops.sum(inputs))

    return Meeting()


@case("PyTorch's threads", replicas=REPLICAS, backends=("torch",))
def in_the_calling_thread(lab):
    """Replicas share the calling thread, unless the user's code may read the updated weights."""
    for metrics, is_one in ((["mae"], True), ([of_rows], False)):
        seen = []
        with lab.strategy().scope():
            model = stack([noting(seen), keras.layers.Dense(1)], metrics=metrics)
        TRAIN(model)  # its first step is compared with one device's, in threads
        for run in (TRAIN, evaluate(X, Y)):
            seen.clear()
            run(model)
            alone = is_one or run is not TRAIN
            lab.check((set(seen) == {threading.get_ident()}) == alone, f"{metrics}: {set(seen)}")


@case("PyTorch's threads", replicas=REPLICAS, backends=("torch",))
def cores_after_a_step(lab):
    """The caller and new threads compute on as many cores as before replicas ran in threads."""
    found = []

    def count():
        found.append(torch.get_num_threads())

    count()
    for layer in (keras.layers.BatchNormalization(), meeting()):
        with lab.strategy().scope():
            model = stack([layer, keras.layers.Dense(1)])
        layer.on = True  # so that the second layer meets
        TRAIN(model)
        count()
        thread = threading.Thread(target=count)
        thread.start()
        thread.join()
    lab.check(len(set(found)) == 1, found)


@case("PyTorch's threads", replicas=REPLICAS, backends=("torch",))
def metrics_that_read_weights(lab):
    """A metric, as class and as function, that reads the weights that the step has updated."""

    def build(kind):
        layer = keras.layers.Dense(1)

        def of_weights(y_true, y_pred):
            return of_rows(y_true, y_pred) * keras.ops.max(keras.ops.abs(layer.kernel))

        class OfWeights(keras.metrics.Mean):
            def update_state(self, y_true, y_pred, sample_weight=None):
                return super().update_state(keras.ops.sum(layer.kernel))

        return stack([layer], metrics=["mae", kind(of_weights, OfWeights)])

    for kind in (lambda function, _: function, lambda _, metric: metric()):
        lab.same(partial(build, kind), TRAIN, TRAIN, evaluate(X, Y), share_plain=False)


@case("PyTorch's threads", replicas=REPLICAS, backends=("torch",))
def a_layer_that_meets_later(lab):
    """A layer sums over the replicas in a later `fit` only, so that they need threads again."""

    def switch(model):
        model.layers[0].on = not model.layers[0].on

    lab.same(
        lambda: stack([meeting(), keras.layers.Dense(1)], metrics=["mae"]),
        *(TRAIN, switch, TRAIN, switch, TRAIN),
        share_plain=False,
    )


@case("PyTorch's threads", replicas=REPLICAS, backends=("torch",))
def a_replica_that_meets_alone(lab):
    """A replica that alone sums is an error that names both calls; then the model trains again."""
    for rank in (0, lab.replicas - 1):
        with lab.strategy().scope():
            model = stack([meeting([rank]), keras.layers.Dense(1)], metrics=["mae"])
        TRAIN(model)
        model.layers[0].on = True
        with lab.raises(kd.errors.ReplicaError, "all replicas to do the same"):
            TRAIN(model)
        model.layers[0].on = False
        TRAIN(model)
