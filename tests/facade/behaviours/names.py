"""Names of TensorFlow 1 and of 2018's MirroredStrategy: what they stand for, or what to write."""

import re

import numpy as np

from kerasdist.core import earlier_names
from tests.conformance.lazy import kd, keras, ops
from tests.facade.behaviours import behaviour
from tests.facade.lab import numbered, variable_of

ROWS = np.arange(8, dtype="float32")


def totals(lab, s, iterator, count):
    found = [s.experimental_run(ops.sum, iterator) for _ in range(count)]
    return [lab.components(one, s) for one in found]


@behaviour(
    "`make_dataset_iterator` returns an iterator with `initialize`, and `experimental_run` takes "
    "its next batch"
)
def _(lab, s):
    iterator = s.make_dataset_iterator([ROWS[:4], ROWS[4:]])
    for _ in range(2):
        iterator.initialize()
        lab.equal([[1, 5], [9, 13]], totals(lab, s, iterator, 2))
    with lab.raises(StopIteration, ""):
        iterator.get_next()
    lab.equal([7.0, 7.0], lab.components(s.experimental_run(lambda: ops.ones(()) * 7), s))


@behaviour(
    "With `make_input_fn_iterator` each replica takes the next batch of its worker's pipeline"
)
def _(lab, s):
    def input_fn(context):
        size = context.get_per_replica_batch_size(4)
        return [ROWS[i : i + size] for i in range(0, 8, size)]

    with s.scope():
        iterator = s.make_input_fn_iterator(input_fn)
        lab.equal([[1, 5], [9, 13]], totals(lab, s, iterator, 2))
    made = s.experimental_distribute_datasets_from_function(input_fn)
    lab.equal([[0, 1], [2, 3]], lab.components(next(iter(made)), s))
    each = s.make_input_fn_iterator(lambda c: [ROWS[c.input_pipeline_id :][:1]], "PER_REPLICA")
    lab.equal([[0], [1]], lab.components(each.get_next(), s))


@behaviour("`unwrap` returns the components, `group` returns None, and `reduce` needs no axis")
def _(lab, s):
    value = numbered(s, lambda i: np.float32(i + 1))
    lab.equal([1.0, 2.0], [float(one) for one in lab.numpy(list(s.unwrap(value)))])
    lab.equal((5,), s.unwrap(5))
    lab.check(s.group(value, name="both") is None, "nothing")
    lab.equal(3.0, s.reduce("SUM", value))
    lab.equal([2.0, 4.0], lab.components(s.experimental_run_v2(lambda x: x * 2, (value,)), s))
    with lab.raises(ValueError, "type function.*use strategy.distribute_datasets_from_function"):
        s.distribute_dataset(lambda: [ROWS])


@behaviour(
    "Strategies have the methods and attributes of 2018: `read_var`, `broadcast`, "
    "`worker_devices`, `should_init` and others"
)
def _(lab, s):
    variable = variable_of(s, 2.0)
    with s.scope(), s.colocate_vars_with(variable):
        lab.equal(2.0, s.read_var(variable))
        lab.check(s.value_container(variable) is variable, "itself")
        mirrored = s.broadcast(ops.ones((1,)), s.worker_devices[0])
        lab.equal([[1.0], [1.0]], lab.components(mirrored, s))
    lab.equal([lab.devices] * 2, [list(s.worker_devices), list(s.parameter_devices)])
    lab.equal((2, 2), (s.num_towers, s.num_replicas))
    facts = (s.should_init, s.should_checkpoint, s.should_save_summary)
    lab.equal((True, True, True), facts)
    lab.equal((False, False), (s.between_graph, s.require_static_shapes))


@behaviour(
    "The names of 2018 call a replica a tower: `get_tower_context`, `tower_id`, `num_towers`"
)
def _(lab, s):
    def step():
        here = kd.get_tower_context()
        lab.check(isinstance(here, kd.TowerContext), "a replica's context")
        lab.check(here.distribution_strategy is s and not kd.in_cross_tower_context(), "its own")
        lab.equal((2, 2), (here.num_towers, here.num_replicas))
        return here.tower_id + 0

    lab.equal([0, 1], lab.components(s.run(step), s))
    with s.scope():
        lab.check(kd.in_cross_tower_context() and kd.has_distribution_strategy(), "in its scope")
        lab.check(kd.get_distribution_strategy() is s, "it")


@behaviour(
    "`extended.update_non_slot` updates all copies, and takes only arguments that are equal on all"
    " devices"
)
def _(lab, s):
    counter = variable_of(s, 1.0)
    with s.scope():
        devices = s.extended.non_slot_devices([counter])
        lab.equal(lab.devices, list(devices))
        with s.extended.colocate_vars_with(devices):
            lab.equal(2, len(lab.components(keras.Variable(0.0), s)))
        total = s.extended.reduce_to("SUM", numbered(s), counter)
        finish = lambda x, by: counter.assign_add(x * by) * 0.0 + 5.0  # noqa: E731
        one = s.extended.update_non_slot(devices, finish, (total,), {"by": 2.0})
        each = s.extended.update_non_slot(devices, finish, (1.0,), {"by": 3.0}, group=False)
        lab.equal([5.0, [5.0, 5.0]], [one, each])
        with lab.raises(ValueError, "equal on all devices.*PerReplica.*update"):
            s.extended.update_non_slot(devices, finish, (numbered(s),))
    lab.equal([6.0, 6.0], lab.components(counter, s))
    with lab.raises(RuntimeError, "update_non_slot in cross-replica"):
        s.run(lambda: s.extended.update_non_slot(devices, lambda: 1.0))


@behaviour(
    "`extended.experimental_between_graph` is False, and `extended.experimental_should_init` is "
    "True"
)
def _(lab, s):
    lab.equal((False, True), (s.extended.experimental_between_graph,
                              s.extended.experimental_should_init))  # fmt: skip
    data = s.extended.experimental_make_numpy_dataset(ROWS).batch(4)
    lab.equal([[0, 1], [2, 3]], lab.components(next(iter(s.distribute_dataset(data))), s))
    with lab.raises(NotImplementedError, "without session.*Received: session=1.*no sessions"):
        s.experimental_make_numpy_dataset(ROWS, session=1)


@behaviour("`get_loss_reduction` returns `SUM`, because the gradients of the replicas are added")
def _(lab, s):
    lab.check(kd.get_loss_reduction() is kd.ReduceOp.SUM, "SUM")


@behaviour(
    "`num_gpus=N` means N GPUs, and `num_gpus=0` the CPU; arguments that ask for what kerasdist "
    "does anyway are accepted"
)
def _(lab, s):
    with lab.raises(ValueError, "Expected a GPU.*Received: devices=.*'gpu:0', 'gpu:1'"):
        kd.MirroredStrategy(num_gpus=2)
    for number in ("num_gpus", "num_gpus_per_worker"):
        one = kd.MirroredStrategy(**{number: 0}, cross_tower_ops=None, prefetch_on_device=True)
        lab.equal(["cpu:0"], list(one.extended.worker_devices))
    kd.MirroredStrategy(lab.devices, auto_shard_dataset=True, num_gpus=None)
    with lab.raises(TypeError, "one of devices, num_gpus.*Received: .*'num_gpus': 1"):
        kd.MirroredStrategy(["cpu:0"], num_gpus=1)


@behaviour(
    "Arguments that ask for a feature that kerasdist lacks raise an error, which says what to "
    "write instead"
)
def _(lab, s):
    for given, advice in (
        ({"cross_tower_ops": "nccl"}, "the backend chooses the collectives"),
        ({"prefetch_on_device": False}, "experimental_fetch_to_device=False"),
        ({"auto_shard_dataset": "files"}, "auto_shard_policy"),
    ):
        [(name, value)] = given.items()
        with lab.raises(
            NotImplementedError, f"without {name}.*Received: {name}={value!r}.*{advice}"
        ):
            kd.MirroredStrategy(lab.devices, **given)
    with lab.raises(TypeError, "unexpected keyword argument 'devises'"):
        kd.MirroredStrategy(devises=2)
    with lab.raises(TypeError, "cluster_resolver=.*communication_options="):
        kd.experimental.MultiWorkerMirroredStrategy(kd.experimental.CollectiveCommunication.RING)


@behaviour(
    "For a name that kerasdist refuses, `hasattr` returns False, and the AttributeError says what "
    "to write instead"
)
def _(lab, s):
    objects = {
        "kerasdist": kd,
        "kerasdist.experimental": kd.experimental,
        "kerasdist.cluster": kd.cluster_resolver,
        "kerasdist.tpu": kd.tpu.experimental,
        "Strategy": s,
        "StrategyExtended": s.extended,
        "ReplicaContext": kd.get_replica_context(),
        "DistributedDataset": s.distribute_dataset([ROWS]),
        "DistributedIterator": iter(s.distribute_dataset([ROWS])),
        "ClusterResolver": kd.cluster_resolver.TPUClusterResolver(),
        "DeviceAssignment": kd.DeviceAssignment.SINGLE_CORE,
        "Topology": kd.DeviceAssignment.SINGLE_CORE.topology,
    }
    lab.equal(set(), set(earlier_names.ADVICE) - objects.keys())
    for of, table in earlier_names.ADVICE.items():
        for name in " ".join(table).split():
            lab.check(not hasattr(objects[of], name), f"{of}.{name} is there")
            advice = earlier_names.look_up(name, earlier_names.ADVICE, of)
            with lab.raises(AttributeError, f"no attribute '{name}'. {re.escape(advice)}"):
                getattr(objects[of], name)
    for of, table in earlier_names.RENAMED.items():
        for name in " ".join(table).split():
            lab.check(hasattr(objects[of], name), f"{of}.{name} is not there")
    with lab.raises(AttributeError, "Strategy has no attribute 'fit'.$"):
        s.fit  # noqa: B018
