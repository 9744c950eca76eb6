"""Variables by creators: mirrored, and synchronised on reading; in every context."""

import tempfile
from pathlib import Path

import numpy as np

from tests.conformance.lazy import kd, keras, ops
from tests.facade.case import case
from tests.facade.lab import numbered, variable_of


def counting(strategy, base=2.0):
    """base, base + 1, ..., one a replica."""
    return numbered(strategy, lambda i: np.float32(base + i))


def on_read(strategy, aggregation, value=0.0):
    options = {"synchronization": "on_read", "aggregation": aggregation}
    return variable_of(strategy, value, trainable=False, **options)


def read(strategy, variable):
    with strategy.scope():
        return strategy.extended.read_var(variable)


AGGREGATED = {"sum": sum, "mean": lambda v: sum(v) / len(v), "only_first_replica": lambda v: v[0]}


@case(replicas=(1, 2, 3))
def assign_in_a_replica(lab, strategy):
    """Assigning to a mirrored variable in replicas combines their values by its aggregation."""
    for aggregation, combine in AGGREGATED.items():
        v = variable_of(strategy, 1.0, aggregation=aggregation)

        def step(x, v=v):
            v.assign(x)
            return v + 0.0

        for run, base in ((strategy.run, 2.0), (kd.function(strategy.run), 20.0)):
            result = run(step, args=(counting(strategy, base),))
            expected = np.float32(combine([base + i for i in range(lab.replicas)]))
            lab.equal([expected] * lab.replicas, lab.components(result, strategy))
            lab.equal([expected] * lab.replicas, lab.components(v, strategy))
            lab.equal(expected, v)


@case(replicas=(2, 3))
def adding_in_a_replica(lab, strategy):
    """`assign_add` and `assign_sub` in replicas combine the added values by the aggregation.

    An integer to which all replicas add the same number needs no aggregation.
    """
    v = variable_of(strategy, 1.0, aggregation="mean")
    strategy.run(lambda x: v.assign_add(x), args=(counting(strategy),))  # noqa: PLW0108
    mean = 2.0 + (lab.replicas - 1) / 2
    lab.equal([1.0 + mean] * lab.replicas, lab.components(v, strategy))
    strategy.run(lambda x: v.assign_sub(x), args=(counting(strategy),))  # noqa: PLW0108
    lab.equal([1.0] * lab.replicas, lab.components(v, strategy))
    counter = variable_of(strategy, 0, dtype="int32", trainable=False)
    for _ in range(3):
        strategy.run(lambda: counter.assign_add(1) is None)
    lab.equal([3] * lab.replicas, lab.components(counter, strategy))
    lab.equal(3, counter)


@case
def assign_in_cross_replica_context(lab, strategy):
    """Assigning outside of replicas sets every component of a variable."""
    with strategy.scope():
        v = keras.Variable([1.0, 2.0], aggregation="sum")
        v.assign([3.0, 4.0])
        v.assign_add([1.0, 1.0])
        lab.equal([4.0, 5.0], v)
    lab.equal([[4.0, 5.0]] * 2, lab.components(v, strategy))
    v.assign_sub([4.0, 5.0])
    lab.equal([[0.0, 0.0]] * 2, lab.components(v, strategy))
    lab.equal([[1.0, 1.0]] * 2, lab.components(strategy.run(lambda: v + 1.0), strategy))


@case
def assign_in_update_context(lab, strategy):
    """`extended.update` assigns to each copy of a variable, without an aggregation.

    An on-read variable starts with its initial value in each replica. So a sum over replicas
    begins as the initial value times the number of replicas.
    """
    for aggregation in ("none", "sum", "mean"):
        with strategy.scope():
            v = keras.Variable(1.0, aggregation=aggregation)
            strategy.extended.update(v, lambda v, x: v.assign_add(x), args=(4.0,))
        lab.equal([5.0, 5.0], lab.components(v, strategy))
    v = on_read(strategy, "sum")
    with strategy.scope():
        strategy.extended.update(v, lambda v, x: v.assign_add(x), args=(counting(strategy),))
        lab.equal([2.0, 3.0], lab.components(v, strategy))
        strategy.extended.update(v, lambda v, x: v.assign_add(x), args=(4.0,))  # to each
    lab.equal([6.0, 7.0], lab.components(v, strategy))

    def in_a_merge_call():
        merge = lambda given: given.extended.update(v, lambda v: v.assign_add(1.0)) is None  # noqa: E731
        kd.get_replica_context().merge_call(merge)

    strategy.run(in_a_merge_call)
    lab.equal([7.0, 8.0], lab.components(v, strategy))
    lab.equal(2.0, read(strategy, on_read(strategy, "sum", 1.0)))
    lab.equal(1.0, read(strategy, on_read(strategy, "mean", 1.0)))


@case
def assign_in_a_merge_call(lab, strategy):
    """A replica reads the value that its merge call has assigned."""
    v = variable_of(strategy, 1.0, aggregation="sum")

    def merge(given, x):
        v.assign(given.reduce("SUM", x, axis=None) * 2.0)

    def step(x):
        kd.get_replica_context().merge_call(merge, args=(x,))
        return v + x

    result = strategy.run(step, args=(counting(strategy, 1.0),))
    lab.equal([7.0, 8.0], lab.components(result, strategy))
    lab.equal([6.0, 6.0], lab.components(v, strategy))


@case(replicas=(1, 2, 3))
def on_read_by_each_aggregation(lab, strategy):
    """Replicas have own values of an on-read variable; reads outside aggregate them."""
    for aggregation, combine in AGGREGATED.items():
        v = on_read(strategy, aggregation)

        def add(x, v=v):
            v.assign_add(x)
            return v + 0.0

        values = [2.0 + i for i in range(lab.replicas)]
        result = strategy.run(add, args=(counting(strategy),))
        lab.equal(values, lab.components(result, strategy))
        lab.equal(values, lab.components(v, strategy))
        # From run to run each replica keeps its own, compiled or not.
        kd.function(strategy.run)(add, args=(counting(strategy),))
        values = [2 * one for one in values]
        lab.equal(values, lab.components(v, strategy))
        lab.equal(np.float32(combine(values)), read(strategy, v))
        with strategy.scope():
            lab.equal(np.float32(combine(values)), v)
            # Cross-replica: a sum is divided, anything else goes to every component.
            v.assign(6.0)
        each = 6.0 / lab.replicas if aggregation == "sum" else 6.0
        lab.equal([each] * lab.replicas, lab.components(v, strategy))
        lab.equal(6.0, read(strategy, v))
        strategy.run(lambda v=v: v.assign_sub(1.0) is None)
        lab.equal([each - 1.0] * lab.replicas, lab.components(v, strategy))


@case
def on_read_without_aggregation_has_no_common_value(lab, strategy):
    """Outside of replicas, an on-read variable without an aggregation cannot be read."""
    v = on_read(strategy, "none")
    strategy.run(lambda x: v.assign(x) is None, args=(counting(strategy),))
    result = strategy.run(lambda: v + 0.0)
    lab.equal([2.0, 3.0], lab.components(result, strategy))
    for look in (lab.numpy, lambda v: read(strategy, v), lambda v: v + 1.0):
        with lab.raises(ValueError, "aggregation"):
            look(v)
    with strategy.scope(), lab.raises(ValueError, "aggregation"):
        lab.numpy(v)
    lab.equal([2.0, 3.0], lab.components(v, strategy))
    with strategy.scope():
        strategy.extended.update(v, lambda v: v.assign(v * 2.0))
    lab.equal([4.0, 6.0], lab.components(v, strategy))
    lab.still_usable(strategy)


@case
def no_synchronization_in_a_scope(lab, strategy):
    """`synchronization="none"` is refused in the scope of several replicas."""
    for one in (strategy, kd.CentralStorageStrategy(lab.devices)):
        with lab.raises(ValueError, "Expected synchronization to be.*Received: sync.*outside"):
            variable_of(one, 1.0, synchronization="none")
    lab.equal(1.0, keras.Variable(1.0, synchronization="none"))
    lab.equal(1.0, variable_of(kd.OneDeviceStrategy("cpu:0"), 1.0, synchronization="none"))


@case
def assign_where_all_replicas_have_one_copy(lab):
    """`CentralStorageStrategy` combines what replicas assign as `MirroredStrategy` does."""
    for strategy in (lab.strategy(), kd.CentralStorageStrategy(lab.devices)):
        for aggregation, combine in AGGREGATED.items():
            for method, results in (
                ("assign", [2.0, 3.0]),
                ("assign_add", [12.0, 13.0]),
                ("assign_sub", [8.0, 7.0]),
            ):
                v = variable_of(strategy, 10.0, aggregation=aggregation)
                for run in (strategy.run, kd.function(strategy.run)):
                    v.assign(10.0)
                    step = lambda x, v=v, method=method: getattr(v, method)(x) is None  # noqa: E731
                    run(step, args=(counting(strategy),))
                    lab.equal(np.float32(combine(results)), v)


@case
def types_without_a_sum_or_a_mean(lab, strategy):
    """A mean of integers or booleans, and a sum of booleans, is refused as aggregation."""
    number = numbered(strategy, lambda i: np.int32(i + 1))

    def assign(dtype, **options):
        v = variable_of(strategy, 1, dtype=dtype, trainable=False, **options)
        strategy.run(lambda x: v.assign(ops.cast(x, dtype)) is None, args=(number,))

    for synchronization in ("auto", "on_write", "on_read"):
        for dtype in ("int32", "uint8", "bool"):
            with lab.raises(ValueError, "(?i)mean"):
                assign(dtype, synchronization=synchronization, aggregation="mean")
        with lab.raises(TypeError, "Expected numbers to add.*Received: dtype=bool"):
            assign("bool", synchronization=synchronization, aggregation="sum")
    lab.still_usable(strategy)


@case(replicas=(2, 3))
def on_read_sums_of_integers_keep_the_rest(lab, strategy):
    """An on-read sum of integers may be set to a number that replicas cannot share equally."""
    v = on_read(strategy, "sum", 0)
    lab.equal("int32", keras.backend.standardize_dtype(v.dtype))
    with strategy.scope():
        v.assign(5)

    def step():
        v.assign_add(10)

    def step_after_merge_call():
        kd.get_replica_context().merge_call(lambda _: v.assign(7) is None)
        v.assign_add(10)

    replicas = strategy.num_replicas_in_sync
    strategy.run(step)
    lab.equal(5 + 10 * replicas, read(strategy, v))
    strategy.run(step_after_merge_call)
    lab.equal(7 + 10 * replicas, read(strategy, v))


@case
def metrics_in_steps(lab, strategy):
    """Metrics that replicas update return results for the examples of all replicas."""
    with strategy.scope():
        mean, accuracy = keras.metrics.Mean(), keras.metrics.SparseCategoricalAccuracy()
        area = keras.metrics.AUC(num_thresholds=20)
    data = np.random.default_rng(3)
    y, p = data.integers(0, 2, 10), data.random((10, 2)).astype("float32")
    batches = strategy.distribute_dataset([(y[:4], p[:4]), (y[4:], p[4:])])

    @kd.function
    def compiled(batch):
        def step(y, p):
            mean.update_state(p)
            accuracy.update_state(y, p)
            area.update_state(y, p[:, 1])

        strategy.run(step, args=batch)

    for _ in range(2):
        for batch in batches:
            compiled(batch)
        lab.check(abs(float(mean.result()) - p.mean()) < 1e-6, f"received {float(mean.result())}")
        expected = (p.argmax(1) == y).mean()
        lab.check(abs(float(accuracy.result()) - expected) < 1e-6, "accuracy")
        plain = keras.metrics.AUC(num_thresholds=20)
        plain.update_state(y, p[:, 1])
        lab.check(abs(float(area.result()) - float(plain.result())) < 1e-6, "area")
        for metric in (mean, accuracy, area):
            metric.reset_state()


@case
def restoring_a_sum_divides_it(lab, strategy):
    """A saved and loaded on-read sum has the same value as before."""

    class Counting(keras.layers.Layer):
        def build(self, shape):
            self.seen = keras.Variable(
                0.0, trainable=False, synchronization="on_read", aggregation="sum", name="seen"
            )
            self.scale = self.add_weight(shape=(), initializer="ones", name="scale")

        def call(self, x):
            self.seen.assign_add(ops.sum(x))
            return x * self.scale

    def build():
        return keras.Sequential([keras.Input((1,)), Counting()])

    with strategy.scope():
        model, other = build(), build()
    x = numbered(strategy, lambda i: np.float32([[1.0 + 2 * i]]))
    strategy.run(lambda x: model(x), args=(x,))  # noqa: PLW0108
    layer, restored = model.layers[-1], other.layers[-1]
    with strategy.scope():
        lab.equal(4.0, layer.seen)
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "all.weights.h5")
        model.save_weights(path)
        other.load_weights(path)
    with strategy.scope():
        lab.equal(4.0, restored.seen)
    lab.equal([2.0, 2.0], lab.components(restored.seen, strategy))
    lab.equal([1.0, 1.0], lab.components(restored.scale, strategy))


@case
def dropout_in_replicas(lab):
    """Dropout masks differ between replicas and repeat with a seed; replica 0's is one device's."""

    def masks():
        keras.utils.set_random_seed(11)
        keras.backend.clear_session()
        strategy = lab.strategy()
        with strategy.scope():
            layer = keras.layers.Dropout(0.5, seed=3)
        run = lambda: strategy.run(lambda: layer(ops.ones((64,)), training=True))  # noqa: E731
        compiled = kd.function(run)
        runs = [lab.components(one(), strategy) for one in (run, compiled, compiled)]
        return runs, lab.numpy(layer.seed_generator.state)

    runs, state = masks()
    drawn = [one for run in runs for one in run]
    for index, one in enumerate(drawn):
        for other in drawn[:index]:
            lab.check((one != other).any(), "two replicas or two steps drew the same")
    again, state_again = masks()
    lab.equal(runs, again)
    lab.equal(state, state_again)
    plain = keras.layers.Dropout(0.5, seed=3)
    for turn in range(3):
        lab.equal(runs[turn][0], plain(ops.ones((64,)), training=True))
    lab.equal(lab.numpy(plain.seed_generator.state), state)


@case
def a_metric_of_whole_numbers_is_updated_statelessly(lab, strategy):
    """Outside of replicas, `stateless_update_state` does not change the metric itself."""

    class Count(keras.metrics.Metric):
        def __init__(self):
            super().__init__()
            self.total = self.add_variable((), "zeros", dtype="int32")

        def update_state(self, x):
            self.total.assign(self.total + keras.ops.shape(x)[0])

        def result(self):
            return self.total

    with strategy.scope():
        metric = Count()
        metric.update_state(np.zeros(3))
        values = [keras.ops.convert_to_tensor(one) for one in metric.variables]
        new = metric.stateless_update_state(values, np.zeros(4))
    lab.equal(7, lab.numpy(new[0]))
    lab.equal(3, lab.numpy(metric.result()))


@case(backends=("tensorflow", "torch"))
def made_and_dropped(lab, strategy):
    """Variables that a step makes and drops have values of their own."""

    def step():
        numbers = (5.0, 7.0, 9.0)  # Python gives the next variable the place of the last
        return ops.stack([keras.Variable(one, trainable=False) + 0.0 for one in numbers])

    lab.equal([[5.0, 7.0, 9.0]] * 2, lab.components(strategy.run(step), strategy))
