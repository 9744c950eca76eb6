"""The public names are frozen: a change here is a change of the API, for the CHANGELOG."""

import kerasdist
from tests.fresh import run_forked

NAMES = """
AutoShardPolicy CentralStorageStrategy CommunicationImplementation CommunicationOptions
DeviceAssignment DistributedDataset DistributedIterator DistributedValues InputContext InputOptions
InputReplicationMode Mirrored MirroredStrategy MultiWorkerMirroredStrategy OneDeviceComparison
OneDeviceStrategy PerReplica ReduceOp ReplicaContext RunOptions Sharding Strategy StrategyExtended
TPUStrategy ValueContext __version__ auto callbacks cluster cluster_resolver
compare_with_one_device compute_average_loss config connect_to_cluster describe_layout errors
experimental
experimental_set_strategy function get_loss_reduction get_replica_context get_strategy global_batch
has_strategy in_cross_replica_context launch load_checkpoint predict_to print save_checkpoint
scale_regularization_loss tpu value_and_grad
"""
PUBLIC = NAMES.split()


def test_the_public_names():
    assert sorted(kerasdist.__all__) == sorted(PUBLIC)
    assert set(PUBLIC) <= set(dir(kerasdist))


def test_all_that_is_public_resolves_and_has_a_docstring():
    # Methods and properties: a field of a dataclass is described in the docstring of its class.
    code = """
import inspect, kerasdist
public = {name: getattr(kerasdist, name) for name in kerasdist.__all__ if name != "__version__"}
members = {
    f"{name}.{member}": value
    for name, one in public.items() if inspect.isclass(one)
    for member in dir(one) if not member.startswith("_")
    if inspect.isroutine(value := getattr(one, member)) or isinstance(value, property)
}
print("without:", *(name for name, one in (public | members).items() if not inspect.getdoc(one)))
"""
    assert run_forked(code, "jax").splitlines()[-1] == "without:"
