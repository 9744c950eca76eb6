"""What runs in replicas: contexts, AutoGraph, collectives, errors."""

import tensorflow as tf

from tests.facade.side_by_side.harness import case, error_of, per_replica, ways


@case
def run_selects_components(d, strategy):
    x = per_replica(strategy, lambda i: tf.fill((2,), float(i)))
    nest = {"a": [x, (tf.constant(1.0), 2)], "b": "text"}
    step = lambda x, nest: (x + nest["a"][1][0], {"n": nest["a"][0] * 2, "t": nest["b"]})  # noqa: E731
    return [
        strategy.run(step, args=(x, nest)),
        strategy.run(step, args=[x], kwargs={"nest": nest}),
        strategy.run(lambda: (d.get_replica_context().num_replicas_in_sync, None, "same")),
    ]


@case
def values_pass_without_a_copy(d, strategy):
    tensors = [tf.constant(1.0), tf.constant(2.0), tf.constant(3.0)]
    x = per_replica(strategy, lambda i: tensors[i])
    [seen, result] = [[], strategy.run(lambda x: x, args=(x,))]
    strategy.run(seen.append, args=(x,))
    parts = strategy.experimental_local_results(result)
    return [seen[0] is tensors[0], parts[1] is tensors[1], strategy.experimental_local_results(5)]


@case
def run_compiled(d, strategy):
    x = per_replica(strategy, lambda i: tf.fill((i + 1, 2), float(i + 1)))
    return ways(strategy, lambda x: {"twice": x * 2, "sum": tf.reduce_sum(x)}, x)


@case
def autograph_in_replicas(d, strategy):
    numbers = tf.data.Dataset.range(4)

    def step(x):
        if tf.reduce_sum(x) > 2.0:
            y = x + 1.0
        else:
            y = x - 1.0
        total = tf.constant(0, tf.int64)
        for number in numbers:
            if tf.math.floormod(number, 2) == 0:
                continue
            total += number
        while tf.reduce_sum(y) < 10.0:
            y = y * 2.0 + 3.0
        return y, total

    def outer(x):
        return strategy.run(step, args=(x,))

    x = per_replica(strategy, lambda i: tf.fill((2,), float(i)))
    return [tf.function(outer)(x), strategy.run(tf.function(step), args=(x,))]


@case
def autograph_in_merge_calls(d, strategy):
    def merge(given, x):
        total = given.reduce("SUM", x, axis=None)
        if total > 2.0:
            total = total * 10.0
        return total

    def step(x):
        return d.get_replica_context().merge_call(merge, args=(x,)) + 1.0

    x = per_replica(strategy, lambda i: tf.constant(float(i + 1)))
    return tf.function(lambda x: strategy.run(step, args=(x,)))(x)


@case
def contexts(d, strategy):
    here = lambda: [d.in_cross_replica_context(), d.get_replica_context() is None, d.has_strategy()]  # noqa: E731
    with strategy.scope():
        inside = [*here(), d.get_strategy() is strategy]
        merged = strategy.run(
            lambda: d.get_replica_context().merge_call(lambda given: [*here(), given is strategy])
        )
    replica = strategy.run(
        lambda: (
            *here(),
            d.get_replica_context().num_replicas_in_sync,
            d.get_strategy() is strategy,
        )
    )
    return [here(), inside, merged, replica, strategy.num_replicas_in_sync]


@case
def all_reduce(d, strategy):
    x = per_replica(strategy, lambda i: tf.constant([1.0, float(i)]))

    def step(x):
        here = d.get_replica_context()
        return [
            here.all_reduce("SUM", x),
            here.all_reduce("MEAN", {"a": [x, (x * 2.0,)], "b": tf.reduce_sum(x)}),
            here.all_reduce("SUM", tf.cast(x, tf.int32)),
            here.all_reduce("SUM", tf.cast(x, tf.float16)),
        ]

    return ways(strategy, step, x)


@case
def all_reduce_slices(d, strategy):
    def step(i):
        slices = tf.IndexedSlices(
            tf.fill((1, 2), tf.cast(i, tf.float32)), tf.stack([i]), tf.constant([3, 2])
        )
        summed, total = d.get_replica_context().all_reduce("SUM", [slices, tf.cast(i, tf.float32)])
        return tf.convert_to_tensor(summed), total

    return ways(strategy, step, per_replica(strategy, tf.constant))


@case
def gradients_of_all_reduce(d, strategy):
    def step(x):
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as tape:
                tape.watch(x)
                here = d.get_replica_context()
                total = here.all_reduce("SUM", x * x)
                mean, counted = here.all_reduce("MEAN", [x * 3.0, tf.reduce_sum(x)])
                y = tf.reduce_sum(total * total * x[0]) + tf.reduce_sum(mean) * counted
            gradient = tape.gradient(y, x)
        return y, gradient, outer.gradient(gradient, x)

    return ways(strategy, step, per_replica(strategy, lambda i: tf.constant([1.0, 2.0 + i])))


@case
def all_gather(d, strategy):
    x = per_replica(strategy, lambda i: tf.reshape(tf.range(2.0 * (i + 1)), (1, i + 1, 2)))

    def step(x):
        here = d.get_replica_context()
        nest = {"whole": tf.cast(x, tf.int32), "list": [x * 2.0]}
        return here.all_gather(x, axis=1), here.all_gather(nest, axis=1)

    return ways(strategy, step, x)


@case
def gradients_of_all_gather(d, strategy):
    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            rows = d.get_replica_context().all_gather(x, axis=1)
            y = tf.reduce_sum(rows * rows * (1.0 + x[0, 0]))
        return tape.gradient(y, x)

    x = per_replica(strategy, lambda i: tf.reshape(tf.range(1.0, 1.0 + 2 * (i + 1)), (2, i + 1)))
    return ways(strategy, step, x)


@case
def merge_call(d, strategy):
    def merge(given, x, n, text, scale=1.0):
        assert given is strategy
        total = given.reduce("SUM", x, axis=None) * scale
        return given.extended.broadcast_to(total, x), given.experimental_local_results(n), text

    def step(x):
        here = d.get_replica_context()
        merged, parts, _ = here.merge_call(merge, args=(x, x * 2.0, "same"), kwargs={"scale": 2.0})
        return merged + x, [part + 0.0 for part in parts]

    return ways(strategy, step, per_replica(strategy, lambda i: tf.constant(float(i))))


@case
def errors(d, strategy):
    x = per_replica(strategy, lambda i: tf.ones((i + 1, 2)))

    def own(kind):
        def step():
            if d.get_replica_context().replica_id_in_sync_group == 0:
                raise kind("the user's")
            d.get_replica_context().all_reduce("SUM", 1.0)

        return step

    def uneven():
        here = d.get_replica_context()
        if here.replica_id_in_sync_group == tf.constant(0):
            here.all_reduce("SUM", 1.0)

    nested = tf.function(lambda: d.get_replica_context().all_reduce("SUM", 1.0))
    calls = [
        lambda: strategy.run(lambda x: x, args=x),
        lambda: strategy.gather(per_replica(strategy, lambda i: tf.constant(1.0)), axis=0),
        lambda: strategy.run(own(ValueError)),
        lambda: strategy.run(own(KeyError)),
        tf.function(lambda: strategy.run(own(TypeError))),
        lambda: strategy.run(uneven),
        lambda: strategy.run(nested),
        lambda: strategy.run(lambda: strategy.reduce("SUM", x, axis=0)),
        lambda: strategy.run(lambda: strategy.run(lambda: 1)),
        lambda: strategy.reduce("MAX", x, axis=0),
        lambda: strategy.reduce("MEAN", x, axis=5),
    ]
    return [error_of(call) for call in calls]


@case
def errors_in_compiled_functions(d, strategy):
    """AutoGraph would make something else of those that it does not know; kerasdist does not."""

    class Own(Exception):
        def __init__(self, one, other):
            super().__init__(one, other)

    errors = [Own(1, 2), KeyError("key"), IndexError("index"), ValueError("value")]
    if d is tf.distribute:
        return [type(error).__name__ for error in errors]
    found = []
    for error in errors:

        def step(error=error):
            if d.get_replica_context().replica_id_in_sync_group == 1:
                raise error
            d.get_replica_context().all_reduce("SUM", 1.0)

        try:
            tf.function(lambda step=step: strategy.run(step))()
        except (Own, LookupError, ValueError) as raised:
            found.append(type(raised).__name__)
    return found
