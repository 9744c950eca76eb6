"""The examples of tf.distribute's docstrings that have a case, and why others have none.

They are found in the installed TensorFlow, without importing it. An example is a block between
``` marks, or an unbroken run of lines that begins with ``>>>``.
"""

import ast
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

from tests.conformance import registry

FILES = (
    "distribute_lib",
    "mirrored_strategy",
    "values",
    "tpu_strategy",
    "central_storage_strategy",
    "one_device_strategy",
    "input_lib",
    "../types/distribute",
    "cross_device_ops",
    "collective_util",
    "collective_all_reduce_strategy",
    "cluster_resolver/cluster_resolver",
    "cluster_resolver/gce_cluster_resolver",
    "cluster_resolver/kubernetes_cluster_resolver",
    "cluster_resolver/tfconfig_cluster_resolver",
    "cluster_resolver/tpu/tpu_cluster_resolver",
)

# Files of tf.distribute whose examples are not run, for each reason.
OUTSIDE = {
    "For parameter servers, which kerasdist lacks; its error names two other strategies.": (
        "parameter_server_strategy",
        "parameter_server_strategy_v2",
        "sharded_variable",
        "ps_values",
        "coordinator/cluster_coordinator",
        "coordinator/coordinator_context",
        "coordinator/remote_value",
    ),
    "For `tf.distribute.experimental.rpc`; the error says to use `reduce` and `gather`.": (
        "experimental/rpc/rpc_ops",
    ),
    "For TensorFlow's preemption; the error says to use `kerasdist.experimental.preempt`.": (
        "failure_handling/failure_handling",
        "failure_handling/preemption_watcher",
    ),
    "For functions and classes that TensorFlow does not export, or only for its own tests.": (
        "distribute_coordinator",
        "multi_process_runner",
        "multi_worker_test_base",
        "step_fn",
        "tpu_replicated_variable",
    ),
}

# Which case covers an example: the case, where the example stands, its numbers.
COVERED_BY = """
behaviours.contexts: experimental_set_strategy 1
behaviours.names: HierarchicalCopyAllReduce 1
behaviours.names: NcclAllReduce 1
behaviours.names: ReductionToOneDevice 1
behaviours.names: StrategyExtendedV1_non_slot_devices 1
collectives.gathers_of_nests_and_types: ReplicaContext_all_gather 1 2 3
collectives.sums_and_means_of_nests: ReplicaContextBase_all_reduce 1 2
collectives.types_together: _OptionsExported 1
datasets.a_function_for_all_replicas: OneDeviceStrategy_distribute_datasets_from_function 1
datasets.a_function_for_all_replicas: StrategyV1_make_input_fn_iterator 1
datasets.a_function_for_all_replicas: TPUStrategyV2 3
datasets.an_iterator_in_a_function: DistributedIteratorInterface_element_spec 1
datasets.from_list: DistributedDatasetInterface___iter__ 1
datasets.from_list: StrategyBase_experimental_distribute_dataset 1
datasets.from_rows: StrategyV1_experimental_make_numpy_dataset 1
datasets.input_options: InputOptions 1
datasets.what_an_element_is: DistributedDatasetInterface_element_spec 1
datasets_in_fit.fit_of_one_replica: OneDeviceStrategy_experimental_distribute_dataset 1
docstrings.central_storage: CentralStorageStrategy 1
docstrings.central_storage: CentralStorageStrategy_experimental_distribute_dataset 1
docstrings.central_storage: CentralStorageStrategy_reduce 1
docstrings.clusters: ClusterResolver_task_id 1
docstrings.clusters: ClusterResolver_task_type 1
docstrings.clusters: CollectiveAllReduceStrategy 1
docstrings.clusters: GCEClusterResolver 1
docstrings.clusters: KubernetesClusterResolver 1
docstrings.clusters: KubernetesClusterResolver___init__ 1
docstrings.clusters: SimpleClusterResolver 1
docstrings.clusters: StrategyBase_cluster_resolver 1
docstrings.clusters: TFConfigClusterResolver 1 2
docstrings.clusters: UnionClusterResolver 1 2
docstrings.colocated_variables: StrategyExtendedV2_colocate_vars_with 1
docstrings.devices_of_components: StrategyBase_reduce 2
docstrings.distributed_values: DistributedValues 1 2 3 4 5
docstrings.logical_devices: TPUStrategyV2 7
docstrings.logical_devices: TPUStrategyV2_experimental_assign_to_logical_device 1
docstrings.logical_devices: TPUStrategyV2_experimental_replicate_to_logical_devices 1
docstrings.logical_devices: TPUStrategyV2_experimental_split_to_logical_devices 1
docstrings.loops_over_datasets: DistributedDatasetInterface 1 2 3
docstrings.options_of_a_run: TPUStrategyV1_run 2 3 4 5
docstrings.the_last_batches: DistributedIteratorInterface_get_next 1
docstrings.the_last_batches: DistributedIteratorInterface_get_next_as_optional 1
docstrings.the_way_to_a_tpu_strategy: TPUClusterResolver_connect 1 2
docstrings.the_way_to_a_tpu_strategy: TPUClusterResolver_get_tpu_system_metadata 1
docstrings.the_way_to_a_tpu_strategy: TPUStrategy 1
docstrings.the_way_to_a_tpu_strategy: TPUStrategyV1_run 1
docstrings.the_way_to_a_tpu_strategy: TPUStrategyV2 1 6
docstrings.values_made_in_a_function: StrategyBase_run 2 3
docstrings.values_made_in_a_function: TPUStrategyV2_run 1
docstrings.where_code_runs: get_replica_context 1
docstrings.where_code_runs: get_strategy 1
docstrings.where_code_runs: has_strategy 1
docstrings.where_code_runs: in_cross_replica_context 1
errors.scopes_that_do_not_fit: experimental_set_strategy 2
extended.one_device_and_default_strategies: OneDeviceStrategy 1
extended.one_device_and_default_strategies: OneDeviceStrategy_reduce 1
extended.update_in_a_merge_call: ReplicaContext__update 1 2
extended.update_with_components: StrategyExtendedV2_update 2
extended.variables_of_a_scope: MirroredStrategy 1 2
extended.variables_of_a_scope: StrategyBase_scope 1
extended.variables_of_a_scope: StrategyExtendedV2_variable_created_in_scope 1 2
functions.another_shape_is_another_trace: MirroredStrategy 3
functions.another_shape_is_another_trace: StrategyBase 1
functions.functions_in_functions: StrategyBase_run 1
replica_context.merge_calls: StrategyExtendedV1_call_for_each_replica 1
replica_context.the_default_strategys_context: ReplicaContextBase_merge_call 1
replica_context.who_a_replica_is: ReplicaContextBase 1
training.apply_gradients_and_partial_variables: TPUStrategyV2 4
training.by_hand: CollectiveAllReduceStrategy 2 3
training.by_hand: TPUStrategyV2 2 5
values.gather_values: Strategy_gather 1 2
values.reduce_values: StrategyBase_reduce 1 3 4
values.values_of_objects: Strategy_experimental_distribute_values_from_function 1 2 3 4
values.values_of_objects: ValueContext 1 2
variables.assign_in_update_context: StrategyExtendedV2_update 1
variables.on_read_by_each_aggregation: variable_sync_on_read_context 1
"""

# Examples that stay without a case, and why.
NOT_COVERED = dict.fromkeys(
    ("Hints__1", "Hints__2"), "for `experimental_hints`, which TensorFlow has removed"
)


def folder() -> Path:
    """Returns the folder of the installed tf.distribute."""
    found = importlib.util.find_spec("tensorflow")
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parent / "python" / "distribute"


def examples(file: str) -> list[str]:
    """Returns the names of a file's examples: the class or function, and a number."""
    tree = ast.parse((folder() / f"{file}.py").read_text("utf-8"))
    return [
        f"{path}__{number}"
        for path, text in docstrings(tree, ())
        for number in range(1, count(text) + 1)
    ]


def files_with_examples() -> set[str]:
    """Returns the files of tf.distribute that have examples, its tests left out."""
    found = {str(path.relative_to(folder()).with_suffix("")) for path in folder().rglob("*.py")}
    return {name for name in found if not name.endswith("_test") and examples(name)}


def docstrings(node: ast.AST, path: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
        yield "_".join(path) or "module", ast.get_docstring(node) or ""
    for child in ast.iter_child_nodes(node):
        name = child.name if isinstance(child, ast.ClassDef | ast.FunctionDef) else None
        yield from docstrings(child, (*path, name) if name else path)


def count(text: str) -> int:
    found, fenced, prompted = 0, False, False
    for line in text.splitlines():
        words = line.strip()
        if words.startswith("```"):
            found += not fenced
            fenced, prompted = not fenced, False
        elif not fenced:
            begins = words.startswith(">>>") and not prompted
            found += begins
            prompted = bool(words) and (prompted or begins)
    return found


def cases() -> dict[str, registry.Case]:
    """Returns the case of each example, by the example's name."""
    found, covered = registry.load("tests.facade"), {}
    for line in COVERED_BY.split("\n")[1:-1]:
        case, place, *numbers = re.split(r":? ", line)
        covered |= {f"{place}__{number}": found[case] for number in numbers}
    return covered
