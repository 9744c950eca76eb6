"""Names of `tf.distribute` that kerasdist does not have, with the code to write instead.

`RENAMED` has the names that kerasdist spells differently, `ADVICE` the names that it lacks, and
`ARGUMENTS` the arguments that it lacks. A renamed attribute is found under its earlier name. For
any other earlier name, `hasattr` returns False, and the AttributeError says what to write instead.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kerasdist.errors import UnsupportedError

_COLLECTIVES = (
    "Leave out cross_device_ops: the backend chooses the collectives by itself, NCCL between "
    "NVIDIA GPUs."
)
_SERVERS = (
    "kerasdist trains synchronously, without parameter servers. Use "
    "kerasdist.MultiWorkerMirroredStrategy(), or kerasdist.CentralStorageStrategy() to keep "
    "the variables of one machine on one device."
)
_SESSIONS = "There are no sessions to configure: leave the call out."
_PREEMPTION = (
    "Write kerasdist.experimental.preempt(backup), with backup = "
    "kerasdist.callbacks.BackupAndRestore(folder)."
)
_DEVICE_KIND = "Write jax.devices()[0].device_kind."
_ITERATE = "Write iter(dataset)."
_RUN = "Write strategy.run(fn, args=(...), kwargs={...})."
_DESCRIBE = "Describe the cluster by kerasdist.cluster.SimpleClusterResolver(cluster_spec, ...)."
_ENVIRONMENT = f"Leave it out: kerasdist reads it from environment variables. {_DESCRIBE}"
_ORDINAL = "Write topology.tpu_device_ordinal_at_coordinates(...), a device's number."
_TPU_ON_VM = "Run the script on the TPU's own VMs, and leave it out."
_TOPOLOGY = "Write topology = kerasdist.tpu.initialize_tpu_system(resolver), which describes it."

# The new name for each earlier name, by module or class.
# A new name may be a member of a member, such as ``a.b``.
# The new name ``a.`` means that the member ``a`` has a member with the earlier name.
# An empty new name means that the earlier name is found in `kerasdist` itself.
# Here and in the tables below a key may be several names, separated by spaces.
RENAMED: Mapping[str, Mapping[str, str]] = {
    "kerasdist": {
        "CollectiveAllReduceStrategy": "MultiWorkerMirroredStrategy",
        "CollectiveCommunication": "CommunicationImplementation",
        "CollectiveHints": "CommunicationOptions",
        "DistributionStrategy": "Strategy",
        "TowerContext": "ReplicaContext",
        "get_distribution_strategy": "get_strategy",
        "get_tower_context": "get_replica_context",
        "has_distribution_strategy": "has_strategy",
        "in_cross_tower_context": "in_cross_replica_context",
    },
    "Strategy": {
        "between_graph": "extended.experimental_between_graph",
        "broadcast": "extended.broadcast_to",
        "colocate_vars_with non_slot_devices parameter_devices read_var should_checkpoint "
        "should_save_summary value_container worker_devices": "extended.",
        "experimental_distribute_datasets_from_function": "distribute_datasets_from_function",
        "experimental_run_v2": "run",
        "num_replicas num_towers": "num_replicas_in_sync",
        "require_static_shapes": "extended.experimental_require_static_shapes",
        "should_init": "extended.experimental_should_init",
        "unwrap": "experimental_local_results",
    },
    "StrategyExtended": {
        "call_for_each_replica": "_strategy.run",
        "experimental_make_numpy_dataset": "_strategy.",
    },
    "kerasdist.experimental": {
        "CentralStorageStrategy CollectiveCommunication CollectiveHints "
        "CommunicationImplementation CommunicationOptions MultiWorkerMirroredStrategy TPUStrategy "
        "ValueContext": ""
    },
    "ReplicaContext": {
        "distribution_strategy": "strategy",
        "num_replicas num_towers": "num_replicas_in_sync",
        "replica_id tower_id": "replica_id_in_sync_group",
    },
}

# For each name that kerasdist lacks: what to write instead, by module or class.
ADVICE: Mapping[str, Mapping[str, str]] = {
    "kerasdist": {
        "AllReduceCrossDeviceOps AllReduceCrossTowerOps CrossDeviceOps CrossTowerOps "
        "HierarchicalCopyAllReduce MultiWorkerAllReduce NcclAllReduce "
        "ReductionToOneDevice ReductionToOneDeviceCrossTowerOps": _COLLECTIVES,
        "ParameterServerStrategy": _SERVERS,
        "Server": "Workers connect by themselves as a strategy is made: leave it out.",
        "coordinator": _SERVERS,
        "init": "There is nothing to initialize: make a strategy, for example kerasdist.auto().",
    },
    "kerasdist.experimental": {
        "ParameterServerStrategy coordinator partitioners": _SERVERS,
        "PreemptionCheckpointHandler PreemptionWatcher TerminationConfig": _PREEMPTION,
        "rpc": "Workers exchange values by strategy.reduce and strategy.gather.",
    },
    "kerasdist.cluster": {
        "GCEClusterResolver": _DESCRIBE,
        "KubernetesExecutableLocation": _ENVIRONMENT,
        "UnionResolver": _DESCRIBE,
    },
    "kerasdist.tpu": {
        "HardwareFeature": _DEVICE_KIND,
        "TPUSystemMetadata": _TOPOLOGY,
        "XLAOptions": "Set XLA's options by the environment variable XLA_FLAGS.",
        "embedding": "Use keras.layers.Embedding; split_variables divides its table over devices.",
        "shutdown_tpu_system": "The end of the process frees the TPUs: leave it out.",
    },
    "Strategy": {
        "batch_reduce": "Write strategy.extended.batch_reduce_to(op, [(value, destination)]).",
        "call_for_each_tower": _RUN,
        "configure": _SESSIONS,
        "finalize": "There is nothing to finalize: leave the call out.",
        "initialize": "There is nothing to initialize: leave the call out.",
        "is_single_tower": "Write strategy.num_replicas_in_sync == 1.",
        "steps_per_run": "Write model.compile(steps_per_execution=...).",
        "run_steps_on_dataset": "Write a loop: for batch in dataset: strategy.run(...).",
        "update": "Write strategy.extended.update(variable, fn, args=(...)).",
        "update_config_proto": _SESSIONS,
        "update_non_slot": "Write strategy.extended.update_non_slot(devices, fn, args=(...)).",
    },
    "StrategyExtended": {
        "call_for_each_tower": _RUN,
        "experimental_run_steps_on_iterator": "Write a loop: for _ in range(iterations): "
        "strategy.run(fn, args=(next(iterator),)).",
    },
    "ReplicaContext": {"_update": "Write strategy.extended.update(...) in context.merge_call."},
    "DistributedDataset": {
        "make_initializable_iterator": _ITERATE,
        "make_one_shot_iterator": _ITERATE,
        "reduce": "Write a loop over its batches, with strategy.reduce in it.",
    },
    "DistributedIterator": {
        "get_next_as_optional": "Write next(iterator, None): None where the data have ended.",
        "initialize": "Write iter(dataset) once more.",
    },
    "ClusterResolver": {
        "get_coordination_service_leader": "It is worker 0: resolver.rank == 0.",
        "get_job_name": "Write resolver.task_type.",
        "get_master": "Write resolver.master().",
        "get_task_info": "Write resolver.task_type and resolver.task_id.",
        "get_tpu_system_metadata": _TOPOLOGY,
        "set_tpu_topology": _TOPOLOGY,
        "tpu_hardware_feature": _DEVICE_KIND,
    },
    "Topology": {
        "cpu_device_name_at_coordinates": _ORDINAL,
        "serialized": "Pickle the topology itself.",
        "tpu_device_name_at_coordinates": _ORDINAL,
    },
    "DeviceAssignment": {
        "lookup_replicas": "Write assignment.coordinates(replica, logical_core), with which "
        "topology.task_ordinal_at_coordinates(...) returns the number of the worker.",
        "host_device": "Write assignment.tpu_ordinal(replica), the device's number on its host.",
        "tpu_device": "Write assignment.tpu_ordinal(replica, logical_core), a device's number.",
    },
}

# For each argument that kerasdist lacks: what to write instead, by class or function. Such an
# argument is accepted if its value is None, False, 0 or "", because then it asks for nothing.
ARGUMENTS: Mapping[str, Mapping[str, str]] = {
    "a strategy": {
        "cross_device_ops cross_tower_ops": _COLLECTIVES,
        "prefetch_on_device": "Leave it out: batches are placed ahead, unless the dataset gets "
        "kerasdist.InputOptions(experimental_fetch_to_device=False).",
        "auto_shard_dataset": "Leave it out: each worker takes its rows of every batch, unless the "
        'dataset gets kerasdist.InputOptions(auto_shard_policy="OFF").',
    },
    "connect_to_cluster": {
        "cluster_device_filters job_name make_master_device_default protocol task_index": (
            "Leave it out: kerasdist takes it from the resolver."
        )
    },
    "TPUStrategy": {"steps_per_run": "Write model.compile(steps_per_execution=...)."},
    "kerasdist.function": {
        "autograph experimental_attributes experimental_autograph_options experimental_compile "
        "experimental_follow_type_hints experimental_implements experimental_relax_shapes "
        "input_signature reduce_retracing": "Leave it out: a function is compiled once for each "
        "shape of its arguments."
    },
    "experimental_make_numpy_dataset": {"session": _SESSIONS},
    "Topology": {"serialized": "Pickle the topology itself."},
    "DeviceAssignment.build": {"device_order_mode": "Leave it out: XLA finds the rings."},
    "SimpleClusterResolver": {
        "environment master num_accelerators rpc_layer": "Leave it out: each worker asks its "
        "machine, and cluster_spec has the addresses."
    },
    "a resolver": {
        "auto_set_gpu environment executable_location gpus_per_node gpus_per_task "
        "job_to_label_mapping jobs override_client port_base rpc_layer task_id task_type "
        "tasks_per_node tf_server_port": _ENVIRONMENT
    },
    "TPUClusterResolver": {
        "tpu zone project job_name coordinator_name coordinator_address credentials service "
        "discovery_url": _TPU_ON_VM
    },
}

# The accepted values of some arguments in `ARGUMENTS`. All others accept None, False, 0 and "".
# True and "grpc" are accepted here, because they ask for what kerasdist does by itself.
_ACCEPTED = {
    "auto_shard_dataset": (None, False, True),
    "prefetch_on_device": (None, True),
    "rpc_layer": (None, "", "grpc"),
}


def resolve(of: str, owner: object, name: str) -> Any:
    """Returns what an earlier name stands for, or raises an AttributeError that says what to write.

    Args:
        of: The module or class, by its key in the tables, such as ``"Strategy"``.
        owner: The object in which the new name is looked up.
        name: The earlier name.
    """
    new = look_up(name, RENAMED, of)
    if new is not None:
        path = new if new and not new.endswith(".") else new + name
        return operator.attrgetter(path)(owner)
    said = f"{of} has no attribute {name!r}. {look_up(name, ADVICE, of) or ''}"
    raise AttributeError(said.rstrip(), name=name, obj=owner)


class EarlierNames:
    """A mixin for classes that `tf.distribute` has too.

    A renamed attribute is found under its earlier name. For any other attribute that only
    `tf.distribute` has, the error says what to write instead.
    """

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            kinds = (one.__name__ for one in type(self).__mro__)
            return resolve(next(one for one in kinds if one in ADVICE), self, name)


def look_up(name: str, table: Mapping[str, Mapping[str, str]], of: str) -> str | None:
    """Returns the table's entry for `name` in the module or class `of`, None if there is none."""
    known = table.get(of, {})
    return next((known[names] for names in known if name in names.split()), None)


def refuse_arguments(of: str, given: Mapping[str, Any]) -> None:
    """Refuses arguments of `tf.distribute` that a class or function of kerasdist does not have.

    Args:
        of: The class or function, by its key in `ARGUMENTS`.
        given: The arguments by name.

    Raises:
        TypeError: If `tf.distribute` never had an argument of this name.
        UnsupportedError: If `tf.distribute` has or had such an argument, and its value asks for
            something that kerasdist does not do.
    """
    for name, value in given.items():
        said = look_up(name, ARGUMENTS, of)
        if said is None:
            raise TypeError(f"{of} got an unexpected keyword argument {name!r}.")
        if value not in _ACCEPTED.get(name, (None, False, "")):
            raise UnsupportedError(
                f"Expected {of} without {name}. Received: {name}={value!r:.200}. {said}"
            )
