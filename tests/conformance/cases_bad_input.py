"""What is wrong works, or says what was expected, what came, what to do; the strategy lives on."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from tests.conformance.actions import fit, quiet_fit
from tests.conformance.lazy import kd, keras, tf
from tests.conformance.models import classifier, compiled, dense, regression
from tests.conformance.registry import case

N, BATCH = 11, 4
X, Y = regression(N)


@case("bad input")
def no_device(lab):
    """No device, one that is not there, or named twice, a name that is none."""
    for names in (["gpu:7"], ["cpux:0"], [3], ["cpu:0", "cpu:63"], ["cpu:99"]):
        # Which one is not there, and on CPUs what there is, and how there are more.
        is_cpu = "cpu:" in str(names[-1])
        there, cure = ("'cpu:0'.*", ".*set_logical_cpu_devices") if is_cpu else ("", "")
        message = f"expected.*{there}received.*{names[-1]}{cure}"
        with lab.raises(kd.errors.DeviceError, message):
            kd.MirroredStrategy(names)
        with lab.raises(kd.errors.DeviceError, message):
            kd.OneDeviceStrategy(names[-1])
    for names in (["cpu:0", "cpu:0"], ["cpu:1", "/device:CPU:1"]):
        with lab.raises(kd.errors.DeviceError, "once.*received"):
            kd.MirroredStrategy(names)
    with lab.raises(kd.errors.DeviceError, "at least one device.*received"):
        kd.MirroredStrategy([])
    with lab.raises(ValueError, "batch_norm.*received.*batch_norm"):
        kd.MirroredStrategy(lab.devices, batch_norm="global")
    lab.still_usable(lab.strategy())


@case("bad input")
def data_that_do_not_fit(lab):
    """Lengths that differ, changing shapes, no data, no `compile`: Keras's error or ours, soon."""
    strategy = lab.strategy()
    x, y = regression(7)
    with strategy.scope():
        model = dense()
        not_compiled = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    with lab.raises(ValueError, "sizes|cardinality|length|number of samples"):
        model.fit(x, y[:5], verbose=0)
    said = "shape|dimension|size|length|examples|expected|incompatible|broadcast|axis"
    for batches in ([(x, y[:5])], [(x, y), (x[:, :3], y)]):
        with lab.raises(Exception, said):
            model.fit((batch for batch in batches), verbose=0)
    with lab.raises(ValueError, "compile"):
        not_compiled.fit(x, y, verbose=0)

    def outcomes(model):
        found = []
        for call in (
            lambda: model.fit(iter(()), verbose=0),
            lambda: model.predict(np.zeros((0, 4), "float32"), verbose=0),
        ):
            try:
                call()
                found.append("works")
            except Exception as error:  # noqa: BLE001 (plain Keras decides which)
                found.append(type(error).__name__)
        return found

    lab.equal(outcomes(lab.run(dense, [])[0]), outcomes(lab.run(dense, [], strategy)[0]))
    lab.still_usable(strategy)


@case("bad input")
def second_model_shares_layers(lab):
    """A second model that shares layers with the first, both trained."""

    def build():
        inputs = keras.Input((4,))
        hidden = keras.layers.Dense(3, activation="tanh")(inputs)
        first = keras.Model(inputs, keras.layers.Dense(1)(hidden))
        second = keras.Model(inputs, keras.layers.Dense(1)(hidden))
        first.second = [compiled(second, keras.optimizers.SGD(0.05, momentum=0.9), "mae")]
        return compiled(first, keras.optimizers.SGD(0.1), "mse")

    def train_second(model):
        history = model.second[0].fit(X, Y, batch_size=3, verbose=0)
        return [history, model.second[0].get_weights()]

    lab.same(build, fit(X, Y, batch_size=BATCH), train_second, fit(X, Y, batch_size=BATCH))


@case("bad input")
def not_finite_on_one_replica(lab):
    """A loss that is not finite on one replica alone: one device's numbers."""
    x, y = regression(4 * lab.replicas)
    x[-1] = np.inf
    train = quiet_fit(x, y, batch_size=len(x), epochs=3, shuffle=False)
    lab.same(dense, train, share_plain=False)


@case("bad input")
def from_another_thread(lab):
    """A strategy used from another thread: built here, trained there, and the other way round."""
    strategy = lab.strategy()

    def in_a_thread(action):
        def act(*arguments):
            with ThreadPoolExecutor(1) as pool:
                return pool.submit(action, *arguments).result()

        return act

    train = fit(X, Y, batch_size=BATCH, shuffle=False)
    expected = lab.run(dense, [train])[1]
    actual = lab.run(dense, [in_a_thread(train)], strategy)[1]
    lab.equal(expected.parts(True), actual.parts(True))

    def build_inside():
        with strategy.scope():
            return dense()

    other = lab.run(in_a_thread(build_inside), [train])[1]
    lab.equal(expected.parts(True), other.parts(True))
    lab.check(not kd.has_strategy(), "a scope belongs to its thread")


def trained_beside(lab, act):
    """Trains a model while another thread calls ``act(strategy, model)`` again and again.

    Returns the errors of both threads; without any the weights are those of one device.
    """
    x, y = regression(32)
    train = quiet_fit(x, y, batch_size=BATCH, shuffle=False, epochs=3)
    expected = lab.run(dense, [train])[1]
    strategy = lab.strategy()
    model = lab.run(dense, [], strategy)[0]
    begun, acted, ended, errors = threading.Event(), threading.Event(), threading.Event(), []

    class Waits(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            begun.set()
            acted.wait(60)  # the thread acts between two steps at least once

    def collected(run):
        try:
            run()
        except Exception as error:  # noqa: BLE001 (looked at below)
            errors.append(error)

    def actor():
        begun.wait(60)
        while not ended.is_set() and not errors:
            collected(lambda: act(strategy, model))
            acted.set()

    thread = threading.Thread(target=actor)
    thread.start()
    options = {"batch_size": BATCH, "shuffle": False, "epochs": 3, "verbose": 0}
    collected(lambda: model.fit(x, y, callbacks=[Waits()], **options))
    ended.set()
    thread.join(60)
    lab.check(not thread.is_alive(), "the thread should end")
    if not errors:
        lab.equal(expected.weights, model.get_weights())
    lab.still_usable(strategy)
    return errors


@case("bad input", replicas=(2,), like="bad_input.a_thread_predicts_by_a_model_in_training")
def a_thread_copies_the_weights_of_a_model_in_training(lab):
    """A thread predicts by a copy of a model that another thread trains."""
    copies = []

    def act(strategy, model):
        if not copies:
            with strategy.scope():
                copies.append(dense())
        copies[0].set_weights(model.get_weights())
        predicted = copies[0].predict(np.ones((5, 4), "float32"), verbose=0)
        lab.check(np.isfinite(predicted).all(), f"predicted {predicted}")

    errors = trained_beside(lab, act)
    lab.check(not errors, f"no error, received {errors}")


@case("bad input", replicas=(2,))
def a_thread_predicts_by_a_model_in_training(lab):
    """A thread predicts by a model that another thread trains: right, or a clear error."""

    def act(strategy, model):
        model.predict(np.ones((5, 4), "float32"), verbose=0)

    for error in trained_beside(lab, act):
        text = str(error).lower()
        lab.check("expected" in text and "received" in text, f"an unclear message: {error!r}")


@case("bad input", replicas=(2, 3))
def error_in_a_step(lab):
    """A layer that raises on one replica, in the middle: the error comes out, nothing hangs."""

    class Raises(keras.layers.Layer):
        def call(self, x):
            inside = kd.get_replica_context()
            # On JAX there is one program: nothing in it belongs to a replica.
            if lab.backend == "jax" or (inside and inside.replica_id_in_sync_group == 1):
                raise RuntimeError("the user's own error")
            return x

    strategy = lab.strategy()
    with strategy.scope():
        model = compiled(keras.Sequential([Raises(), keras.layers.Dense(1)]), "sgd", "mse")
    with lab.raises(Exception, "the user's own error"):
        model.fit(*regression(12), batch_size=12, verbose=0)
    lab.still_usable(strategy)


@case("bad input", backends=("tensorflow",), replicas=(2,), like="bad_input.data_that_do_not_fit")
def wrong_label_or_ragged_batch(lab):
    """A label out of range, targets fewer than the inputs: the error names its cause."""
    from kerasdist.backends.tensorflow.fit.batches import division_errors

    strategy = lab.strategy()
    model = lab.run(classifier, [], strategy)[0]
    with lab.raises(tf.errors.InvalidArgumentError, "label value of 7"):
        model.fit(np.ones((8, 4), "float32"), np.full(8, 7), batch_size=8, verbose=0)
    model = lab.run(classifier, [], strategy)[0]
    specs = tf.TensorSpec((None, 4)), tf.TensorSpec((None,), "int32")
    batches = [(np.ones((rows, 4), "float32"), np.zeros(4, "int32")) for rows in (4, 6)]
    source = tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=specs)
    with lab.raises(kd.errors.InputError, "same number of examples.*received.*TensorFlow.*: 6"):
        model.fit(source, verbose=0)
    # What TensorFlow reports of a wrong label now and then: the batch's division only waited.
    waited = "label value of 7 [[{{node loss}}]] [[kerasdist_division_of_the_global_batch/_30]]"
    with lab.raises(tf.errors.InvalidArgumentError, "label value of 7"), division_errors():
        raise tf.errors.InvalidArgumentError(None, None, waited)
    lab.still_usable(strategy)


@case("bad input", backends=("tensorflow", "torch"), replicas=(2,))
def a_fixed_batch_size(lab):
    """A layer that makes arrays of the author's batch size: the error says why."""

    class Noisy(keras.layers.Layer):
        def call(self, x):
            return x + keras.ops.ones((6, 3))

    # The size of a batch is known while the step is traced on TensorFlow, or it is not.
    for rows, said in ((6, "3 of the batch's 6 rows"), (11, "of the batch")):
        with lab.strategy().scope():
            model = compiled(keras.Sequential([Noisy(), keras.layers.Dense(1)]), "sgd", "mse")
        notes = ""
        try:
            model.fit(np.ones((rows, 3)), np.ones((rows, 1)), batch_size=6, verbose=0)
        except Exception as error:  # noqa: BLE001 (the framework decides which)
            notes = " ".join(getattr(error, "__notes__", ()))
        lab.check(said in notes and "ops.shape(x)[0]" in notes, f"received the notes {notes!r}")
