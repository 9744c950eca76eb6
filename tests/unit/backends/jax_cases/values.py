"""Distributed values: where their components lie, and how they enter programs."""

import tracemalloc

import jax
import keras
import numpy as np
from jax import numpy as jnp

import kerasdist as kd
from kerasdist.api.functions import function
from kerasdist.api.values import Mirrored, PerReplica
from tests.unit.backends.jax_cases.case import REPLICAS, case, components, index, numbered


@case
def per_replica_values_stay_on_the_devices(strategy):
    value = numbered(strategy)
    array = value.source.array
    assert array.shape == (REPLICAS, 2)
    assert {str(one.device) for one in array.addressable_shards} == {
        str(device) for device in jax.devices()[:REPLICAS]
    }
    with jax.transfer_guard("disallow_explicit"):
        for _ in range(2):
            value = strategy.run(lambda x: x, args=(value,))
    assert [next(iter(one.devices())).id for one in value.values] == list(range(REPLICAS))
    assert [one.shape for one in value.values] == [(2,)] * REPLICAS


@case
def arrays_of_a_batch_enter_together_and_come_out_apart(strategy):
    rng = np.random.default_rng(0)
    batch = {
        "x": rng.normal(size=(4, 3, 2)).astype("float32"),
        "double": rng.normal(size=(4, 1)),
        "n": rng.integers(9, size=4).astype("int32"),
        "rest": [rng.integers(9, size=(4, 2)).astype("int32"), rng.normal(size=(4, 5))],
        "large": rng.normal(size=(4, 4096)).astype("float32"),
    }
    expected = jax.tree.map(np.array, batch)

    @function
    def whole(batch):
        return strategy.gather(strategy.run(lambda x: x, args=(batch,)), axis=0)

    for used in (batch, {"n": batch["n"]}, batch["rest"]):
        [divided] = strategy.distribute_dataset([used])
        part = strategy.local_results(divided)[1]
        for leaf, found in zip(jax.tree.leaves(used), jax.tree.leaves(part), strict=True):
            np.testing.assert_allclose(found, leaf[2:], rtol=1e-6)
        assert jax.tree.structure(whole(divided)) == jax.tree.structure(used)
    [divided] = strategy.distribute_dataset([batch])
    for leaf in jax.tree.leaves(batch):
        leaf[:] = 0  # what is on the devices is a copy
    some = {"rest": divided["rest"][1], "again": divided["rest"][1], "double": divided["double"]}
    found = whole(some)
    np.testing.assert_allclose(found["rest"], expected["rest"][1], rtol=1e-6)
    np.testing.assert_allclose(found["again"], expected["rest"][1], rtol=1e-6)
    np.testing.assert_allclose(found["double"], expected["double"], rtol=1e-6)
    found = whole(divided)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), found, expected)


@case
def arrays_of_a_batch_may_lie_and_be_typed_in_any_way(strategy):
    rng = np.random.default_rng(0)
    numbers = rng.normal(size=(8, 4096)).astype("float32")
    batch = {
        "every other row": numbers[::2, :3],
        "columns first": np.asfortranarray(numbers[:4, 3:6]),
        "backwards": numbers[3::-1, 6],
        "large": numbers[::2],
        "bfloat16": numbers[:4, :2].astype(jnp.bfloat16),
        "flags": numbers[:4] > 0.5,
        "few flags": numbers[:4, :2] > 0.5,
        "bytes": (numbers[:4, 8] * 100).astype("int8"),
        "half": numbers[:4, 9].astype("float16"),
        "complex": numbers[:4, 10] * (1 + 2j),
    }

    @function
    def whole(batch):
        return strategy.gather(strategy.run(lambda x: x, args=(batch,)), axis=0)

    def check(batch):
        [divided] = strategy.distribute_dataset([batch])
        found = whole(divided)
        for name, leaf in batch.items():
            assert found[name].dtype == jax.dtypes.canonicalize_dtype(leaf.dtype), name
            np.testing.assert_array_equal(found[name], leaf.astype(found[name].dtype), name)

    check(batch)
    for name, leaf in batch.items():  # each without neighbours
        check({name: leaf})
    check({"no column": numbers[:4, :0], **batch})


@case
def a_replica_of_several_devices_has_one_component(strategy):
    wide = kd.TPUStrategy(experimental_device_assignment=kd.DeviceAssignment.build(2, (2,)))
    results = strategy.local_results(strategy.run(lambda: index() * 2))
    assert [int(one) for one in results] == [0, 2]
    results = wide.local_results(wide.run(lambda: index() * 2))
    assert [int(one) for one in results] == [0, 2]
    assert [one.shape for one in wide.local_results(numbered(wide))] == [(2,)] * 2


@case
def distributed_values_are_pytrees(strategy):
    value = numbered(strategy)
    doubled = jax.tree.map(lambda x: x * 2, value)
    assert isinstance(doubled, PerReplica)
    np.testing.assert_array_equal(components(strategy, doubled)[1], [4, 4])
    passed = jax.jit(lambda x: x)(value)
    np.testing.assert_array_equal(components(strategy, passed)[1], [2, 2])
    total = strategy.extended.reduce_to("SUM", value, value)
    same, other = function(lambda x, y: (x, y))(value, total)
    assert isinstance(same, PerReplica)
    assert isinstance(other, Mirrored)
    np.testing.assert_array_equal(components(strategy, other)[1], [3, 3])


@case
def a_batch_goes_to_the_devices_when_its_components_are_read(strategy):
    rows = np.arange(4.0, dtype="float32").reshape(4, 1)
    [read, mapped, changed] = strategy.distribute_dataset([rows] * 3)
    where = [next(iter(one.devices())).id for one in strategy.local_results(read)]
    assert where == list(range(REPLICAS))
    np.testing.assert_array_equal(components(strategy, read)[1], rows[2:])
    doubled = jax.tree.map(lambda x: jnp.asarray(x) * 2, mapped)
    total = strategy.reduce("SUM", strategy.run(lambda x: x, args=(doubled,)), axis=None)
    np.testing.assert_array_equal(total, 2 * (rows[:2] + rows[2:]))
    np.testing.assert_array_equal(components(strategy, doubled)[1], 2 * rows[2:])
    rows[:] = 0  # the batch is a copy
    total = strategy.reduce("SUM", strategy.run(lambda x: x, args=(changed,)), axis=None)
    np.testing.assert_array_equal(total, [[2.0], [4.0]])


@case
def components_persist_until_somebody_assigns(strategy):
    with strategy.scope():
        read = keras.Variable(0.0, synchronization="on_read", aggregation="sum")
        free = keras.Variable(0.0, trainable=False)

    def add(x):
        read.assign_add(x[0])
        free.assign(x[0])
        return read + 0.0, free + 0.0

    for _ in range(2):
        both = strategy.run(add, args=(numbered(strategy),))
    assert components(strategy, both[0]) == [2.0, 4.0]
    assert components(strategy, both[1]) == [1.0, 2.0]
    assert float(read.value) == 6.0
    assert float(free.value) == 1.0
    looked_at = strategy.run(lambda: (read + 0.0, free + 0.0))
    assert components(strategy, looked_at[0]) == [2.0, 4.0]
    assert components(strategy, looked_at[1]) == [1.0, 2.0]
    read.assign(10.0)
    free.assign(3.0)
    looked_at = strategy.run(lambda: (read + 0.0, free + 0.0))
    assert components(strategy, looked_at[0]) == [5.0, 5.0]
    assert components(strategy, looked_at[1]) == [3.0, 3.0]


@case
def a_batch_can_be_looked_at_while_a_program_is_traced_for_it(strategy):
    batch = np.arange(8, dtype="float32").reshape(4, 2), np.arange(4, dtype="float32")
    [divided] = strategy.distribute_dataset([batch])
    seen = []

    @function
    def total(batch):
        seen.append(np.asarray(divided[0].values[1]).sum())
        return strategy.reduce("SUM", strategy.run(lambda x, y: x.sum() + y.sum(), batch), None)

    assert [float(total(divided)) for _ in range(2)] == [34.0, 34.0]
    assert set(seen) == {22.0}


@case
def batches_are_not_copied_on_the_host_of_accelerators(strategy):
    place = strategy.replica_set.arrays
    batch = np.ones((8, 128, 128), "float32")
    ragged = batch[:7]

    def copied(make):
        tracemalloc.start()
        found = make()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        for one, expected in zip(
            components(strategy, found), np.split(batch, REPLICAS), strict=True
        ):
            assert one.shape[1:] == expected.shape[1:]
        return peak / batch.nbytes

    ways = {
        "divided": lambda: next(iter(strategy.distribute_dataset([batch]))),
        "put together": lambda: strategy.distribute_values_from_function(
            lambda at: batch[at.replica_id_in_sync_group :: REPLICAS]
        ),
    }
    for name, make in ways.items():
        assert copied(make) > 0.9, name  # on CPUs, where JAX may share NumPy's memory
    place.shares_memory = False
    for name, make in ways.items():
        assert copied(make) < 0.1, name
    # Only the padding of a replica with fewer rows is a copy.
    assert copied(lambda: next(iter(strategy.distribute_dataset([ragged])))) < 0.6


@case
def what_accelerators_get_is_read_before_it_may_change(strategy):
    waited = []
    place = strategy.replica_set.arrays
    place.shares_memory = False
    place.sent = lambda arrays: waited.append(len(jax.tree.leaves(arrays))) or arrays
    [divided] = strategy.distribute_dataset([(np.ones((4, 2)), np.ones(4))])
    assert waited == [2]
    strategy.distribute_values_from_function(lambda _: np.ones(3))
    assert len(waited) > 1
    assert [one.shape for one in components(strategy, divided[0])] == [(2, 2)] * 2
