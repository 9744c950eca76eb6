"""Distributed values: where their components lie, and how they enter programs."""

import tracemalloc

import numpy as np

from tests.conformance.lazy import jax, jnp, kd
from tests.facade.case import of_backend
from tests.facade.cases_jax.programs import components
from tests.facade.lab import numbered

case = of_backend("jax")
REPLICAS = 2


@case
def per_replica_values_stay_on_the_devices(strategy):
    value = numbered(strategy, lambda i: np.full(2, i + 1, "float32"))
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

    @kd.function
    def whole(batch):
        return strategy.gather(strategy.run(lambda x: x, args=(batch,)), axis=0)

    def check(batch):
        [divided] = strategy.distribute_dataset([batch])
        found = whole(divided)
        for name, leaf in batch.items():
            assert found[name].dtype == jax.dtypes.canonicalize_dtype(leaf.dtype), name
            np.testing.assert_array_equal(found[name], leaf.astype(found[name].dtype), name)
        return divided

    divided = check(batch)
    some = whole({"once": divided["backwards"], "again": divided["backwards"]})
    for one in some.values():
        np.testing.assert_array_equal(one, batch["backwards"])
    for name, leaf in batch.items():  # each without neighbours
        check({name: leaf})
    check({"no column": numbers[:4, :0], **batch})


@case
def distributed_values_are_pytrees(strategy):
    value = numbered(strategy, lambda i: np.full(2, i + 1, "float32"))
    doubled = jax.tree.map(lambda x: x * 2, value)
    assert isinstance(doubled, kd.PerReplica)
    np.testing.assert_array_equal(components(strategy, doubled)[1], [4, 4])
    passed = jax.jit(lambda x: x)(value)
    np.testing.assert_array_equal(components(strategy, passed)[1], [2, 2])
    total = strategy.extended.reduce_to("SUM", value, value)
    same, other = kd.function(lambda x, y: (x, y))(value, total)
    assert isinstance(same, kd.PerReplica)
    assert isinstance(other, kd.Mirrored)
    np.testing.assert_array_equal(components(strategy, other)[1], [3, 3])


@case
def a_batch_can_be_looked_at_while_a_program_is_traced_for_it(strategy):
    batch = np.arange(8, dtype="float32").reshape(4, 2), np.arange(4, dtype="float32")
    [divided] = strategy.distribute_dataset([batch])
    seen = []

    @kd.function
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
    place.wait_until_sent = lambda arrays: waited.append(len(jax.tree.leaves(arrays))) or arrays
    [divided] = strategy.distribute_dataset([(np.ones((4, 2)), np.ones(4))])
    assert waited == [2]
    strategy.distribute_values_from_function(lambda _: np.ones(3))
    assert len(waited) > 1
    assert [one.shape for one in components(strategy, divided[0])] == [(2, 2)] * 2
