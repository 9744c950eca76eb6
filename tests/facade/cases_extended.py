"""``strategy.extended``, and what a strategy says of itself."""

import numpy as np

from tests.conformance.lazy import kd, keras, ops
from tests.facade.case import case
from tests.facade.lab import numbered, variable_of


def counting(strategy):
    return numbered(strategy, lambda i: np.float32(1.0 + i))


@case(replicas=(1, 2, 3))
def devices_and_facts(lab, strategy):
    """`extended` has the devices by Keras's names, and the facts that other libraries read."""
    extended = strategy.extended
    lab.equal(lab.devices, list(extended.worker_devices))
    lab.equal(lab.devices, list(extended.parameter_devices))
    lab.equal(lab.replicas, strategy.num_replicas_in_sync)
    facts = (
        extended.experimental_require_static_shapes,
        extended.should_checkpoint,
        extended.should_save_summary,
        strategy.cluster_resolver,
    )
    lab.equal((False, True, True, None), facts)
    lab.check(isinstance(extended, kd.StrategyExtended), "a StrategyExtended")
    lab.check(strategy.extended is extended, "always the same")


@case(replicas=(2, 3))
def reduce_to_and_batch_reduce_to(lab, strategy):
    """`reduce_to` and `batch_reduce_to` reduce to the devices of a variable or value."""
    n = lab.replicas
    with strategy.scope():
        variable = keras.Variable(0.0)
        value = counting(strategy)
        total = n * (n + 1) / 2
        for destination in (variable, value, lab.devices[0]):
            reduced = strategy.extended.reduce_to("SUM", value, destination)
            lab.equal({total}, {float(one) for one in lab.components(reduced, strategy)})
        options = kd.CommunicationOptions(bytes_per_pack=1024)
        both = strategy.extended.batch_reduce_to(
            "MEAN", [(value, variable), (value, value)], options
        )
        for reduced in both:
            lab.equal({total / n}, {float(one) for one in lab.components(reduced, strategy)})
        lab.equal(2, len(both))


@case
def broadcast_read_and_container(lab, strategy):
    """`broadcast_to` copies a tensor to all devices; `read_var` reads a variable."""
    with strategy.scope():
        variable = keras.Variable([1.0, 2.0])
        lab.equal([1.0, 2.0], strategy.extended.read_var(variable))
        lab.check(strategy.extended.value_container(variable) is variable, "itself")
        value = strategy.extended.broadcast_to(ops.convert_to_tensor([1.0, 2.0]), lab.devices)
    result = strategy.run(lambda x: x * 2.0, args=(value,))
    lab.equal([[2.0, 4.0]] * 2, lab.components(result, strategy))


@case
def update_with_components(lab, strategy):
    """`extended.update` gives each copy of a variable its component of the arguments."""
    with strategy.scope():
        variable = keras.Variable(1.0)
        mirrored = strategy.extended.reduce_to("SUM", counting(strategy), variable)
        strategy.extended.update(
            variable, lambda v, x, scale: v.assign_add(x * scale), args=(mirrored,),
            kwargs={"scale": 2.0},
        )  # fmt: skip
        found = strategy.extended.update(
            variable, lambda v, x, y: v + x + y, args=(mirrored,), kwargs={"y": 0.5}, group=False
        )
    lab.equal([7.0, 7.0], lab.components(variable, strategy))
    lab.check(isinstance(found, list), "a list, one a copy")
    lab.equal({10.5}, {float(one) for one in lab.numpy(found)})
    each = variable_of(strategy, 1.0)
    with strategy.scope():
        strategy.extended.update(each, lambda v, x: v.assign_add(x), args=(counting(strategy),))
    lab.equal([2.0, 3.0], lab.components(each, strategy))
    lab.equal([4.0, 6.0], lab.components(strategy.run(lambda: each * 2.0), strategy))


@case
def copies_that_are_updated(lab):
    """`update(group=False)` returns one result for each device that holds the variable."""
    for strategy in (lab.strategy(), kd.CentralStorageStrategy(lab.devices)):
        extended = strategy.extended
        with strategy.scope():
            for options in ({}, {"synchronization": "on_read", "aggregation": "sum"}):
                variable = keras.Variable(1.0, trainable=False, **options)
                for given in ((), (counting(strategy),)):
                    found = extended.update(variable, lambda v, *x: 5.0, given, group=False)
                    lab.equal([5.0] * len(extended.parameter_devices), found)


@case
def update_in_a_merge_call(lab, strategy):
    """A merge call reduces a gradient and updates a variable, as optimizers do."""
    variable = variable_of(strategy, 10.0)

    def merge(given, gradient):
        total = given.extended.reduce_to("SUM", gradient, variable)
        given.extended.update(variable, lambda v, g: v.assign_sub(g), args=(total,))

    def step(x):
        kd.get_replica_context().merge_call(merge, args=(x,))

    strategy.run(step, args=(counting(strategy),))
    lab.equal([7.0, 7.0], lab.components(variable, strategy))
    kd.function(lambda x: strategy.run(step, args=(x,)))(counting(strategy))
    lab.equal([4.0, 4.0], lab.components(variable, strategy))

    def assign(given, value):  # one that was reduced before
        given.extended.update(variable, lambda v, new: v.assign(new / 2.0), args=(value,))

    def reduced(x):
        here = kd.get_replica_context()
        here.merge_call(assign, args=(here.all_reduce("SUM", x * 10.0),))

    strategy.run(reduced, args=(counting(strategy),))
    lab.equal([15.0, 15.0], lab.components(variable, strategy))


@case
def variables_of_a_scope(lab):
    """Variables made in a scope, directly or by layers, are mirrored."""
    strategy, other = lab.strategy(), lab.strategy(3)
    made = []

    def lazily():
        if not made:
            made.append(keras.Variable(1.0))
        return made[0]

    with strategy.scope():
        layer = keras.layers.Dense(2)
        layer.build((None, 3))
        lab.check(lazily() is lazily(), "one variable")
    outside = keras.Variable(1.0)
    for variable in (*layer.weights, *made):
        lab.equal(2, len(lab.components(variable, strategy)))
        lab.equal(True, strategy.extended.variable_created_in_scope(variable))
        lab.equal(False, other.extended.variable_created_in_scope(variable))
    lab.equal([1.0, 1.0], lab.components(made[0], strategy))
    lab.equal(1.0, outside)
    lab.equal(False, strategy.extended.variable_created_in_scope(outside))
    with lab.raises(ValueError, "Expected a variable that was made.*Received: colo"):
        other.extended.colocate_vars_with(layer.weights[0])
    lab.still_usable(other)


@case
def one_device_and_default_strategies(lab):
    """`OneDeviceStrategy` and the default strategy support the same calls."""
    for strategy in (kd.OneDeviceStrategy("cpu:0"), kd.get_strategy()):
        lab.equal(1, strategy.num_replicas_in_sync)
        variable = variable_of(strategy, 2.0)
        if isinstance(strategy, kd.OneDeviceStrategy):
            lab.equal(True, strategy.extended.variable_created_in_scope(variable))
        lab.equal(6.0, strategy.run(lambda v, x: v * x, args=(variable, 3.0)))
        lab.equal(90, sum(strategy.run(lambda x: x * 2, args=(i,)) for i in range(10)))
        lab.equal(4.0, strategy.reduce("SUM", ops.convert_to_tensor([1.0, 3.0]), axis=0))
        lab.equal(3.0, strategy.reduce("SUM", ops.convert_to_tensor(3.0), axis=None))
        lab.equal(2.0, strategy.reduce("MEAN", ops.convert_to_tensor([1.0, 3.0]), axis=0))
        lab.equal([1.0, 3.0], strategy.gather(ops.convert_to_tensor([1.0, 3.0]), axis=0))
        lab.equal([(5,)], [strategy.local_results(5)])
        lab.equal(0, numbered(strategy, lambda i: i))  # fmt: skip
        with strategy.scope():
            strategy.extended.update(variable, lambda v, x: v.assign(x), args=(4.0,))
            lab.equal(4.0, strategy.extended.read_var(variable))
            lab.equal(3.0, strategy.extended.reduce_to("SUM", ops.convert_to_tensor(3.0), variable))
        lab.still_usable(strategy)
    lab.check(not kd.has_strategy(), "no scope is left open")


@case
def summaries(lab):
    """The text of a strategy names its devices."""
    lab.equal("MirroredStrategy(['cpu:0', 'cpu:1'])", str(lab.strategy()))
    lab.equal("OneDeviceStrategy(['cpu:0'])", repr(kd.OneDeviceStrategy("cpu:0")))
    lab.equal("DefaultStrategy()", str(kd.get_strategy()))
