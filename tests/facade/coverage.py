"""Which examples of tf.distribute's docstrings have a case, and why others have none.

They are found in the installed TensorFlow, without importing it. An example is a block between
``` marks, or an unbroken run of lines that begins with ``>>>``.
"""

import ast
import importlib.util
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
)
THEME = "docstrings."

# Examples that a case covers beside others, by the case.
COVERED_BY = {
    "collectives.gathers_of_nests_and_types": (
        "distribute_lib__ReplicaContext_all_gather__1",
        "distribute_lib__ReplicaContext_all_gather__2",
        "distribute_lib__ReplicaContext_all_gather__3",
    ),
    "collectives.sums_and_means_of_nests": (
        "distribute_lib__ReplicaContextBase_all_reduce__1",
        "distribute_lib__ReplicaContextBase_all_reduce__2",
    ),
    "datasets.a_function_for_all_replicas": (
        "one_device_strategy__OneDeviceStrategy_distribute_datasets_from_function__1",
        "distribute_lib__StrategyV1_make_input_fn_iterator__1",
        "tpu_strategy__TPUStrategyV2__3",
    ),
    "datasets.from_list": ("distribute_lib__StrategyBase_experimental_distribute_dataset__1",),
    "datasets.from_rows": ("distribute_lib__StrategyV1_experimental_make_numpy_dataset__1",),
    "datasets.input_options": ("distribute_lib__InputOptions__1",),
    "datasets_in_fit.fit_of_one_replica": (
        "one_device_strategy__OneDeviceStrategy_experimental_distribute_dataset__1",
    ),
    "docstrings.central_storage_strategy__CentralStorageStrategy__1": (
        "central_storage_strategy__CentralStorageStrategy_reduce__1",
        "central_storage_strategy__CentralStorageStrategy_experimental_distribute_dataset__1",
    ),
    "docstrings.distribute_lib__StrategyBase_run__2": (
        "distribute_lib__StrategyBase_run__3",
        "tpu_strategy__TPUStrategyV2_run__1",
    ),
    "docstrings.distribute_lib__get_strategy__1": (
        "distribute_lib__get_replica_context__1",
        "distribute_lib__has_strategy__1",
        "distribute_lib__in_cross_replica_context__1",
    ),
    "docstrings.tpu_strategy__TPUStrategyV1_run__2": (
        "tpu_strategy__TPUStrategyV1_run__3",
        "tpu_strategy__TPUStrategyV1_run__4",
        "tpu_strategy__TPUStrategyV1_run__5",
    ),
    "docstrings.tpu_strategy__TPUStrategyV2_experimental_replicate_to_logical_devices__1": (
        "tpu_strategy__TPUStrategyV2_experimental_split_to_logical_devices__1",
        "tpu_strategy__TPUStrategyV2_experimental_assign_to_logical_device__1",
        "tpu_strategy__TPUStrategyV2__7",
    ),
    "extended.one_device_and_default_strategies": (
        "one_device_strategy__OneDeviceStrategy__1",
        "one_device_strategy__OneDeviceStrategy_reduce__1",
    ),
    "extended.update_in_a_merge_call": (
        "distribute_lib__ReplicaContext__update__1",
        "distribute_lib__ReplicaContext__update__2",
    ),
    "extended.update_with_components": ("distribute_lib__StrategyExtendedV2_update__2",),
    "extended.variables_of_a_scope": (
        "distribute_lib__StrategyBase_scope__1",
        "distribute_lib__StrategyExtendedV2_variable_created_in_scope__1",
        "distribute_lib__StrategyExtendedV2_variable_created_in_scope__2",
        "mirrored_strategy__MirroredStrategy__1",
        "mirrored_strategy__MirroredStrategy__2",
    ),
    "functions.another_shape_is_another_trace": (
        "distribute_lib__StrategyBase__1",
        "mirrored_strategy__MirroredStrategy__3",
    ),
    "functions.functions_in_functions": ("distribute_lib__StrategyBase_run__1",),
    "replica_context.merge_calls": ("distribute_lib__StrategyExtendedV1_call_for_each_replica__1",),
    "replica_context.the_default_strategys_context": (
        "distribute_lib__ReplicaContextBase_merge_call__1",
    ),
    "replica_context.who_a_replica_is": ("distribute_lib__ReplicaContextBase__1",),
    "errors.scopes_that_do_not_fit": ("distribute_lib__experimental_set_strategy__2",),
    "training.apply_gradients_and_partial_variables": ("tpu_strategy__TPUStrategyV2__4",),
    "training.by_hand": ("tpu_strategy__TPUStrategyV2__2", "tpu_strategy__TPUStrategyV2__5"),
    "values.gather_values": (
        "distribute_lib__Strategy_gather__1",
        "distribute_lib__Strategy_gather__2",
    ),
    "values.reduce_values": (
        "distribute_lib__StrategyBase_reduce__1",
        "distribute_lib__StrategyBase_reduce__3",
        "distribute_lib__StrategyBase_reduce__4",
    ),
    "values.values_of_objects": (
        "distribute_lib__Strategy_experimental_distribute_values_from_function__1",
        "distribute_lib__Strategy_experimental_distribute_values_from_function__2",
        "distribute_lib__Strategy_experimental_distribute_values_from_function__3",
        "distribute_lib__Strategy_experimental_distribute_values_from_function__4",
        "distribute_lib__ValueContext__1",
        "distribute_lib__ValueContext__2",
    ),
    "variables.assign_in_update_context": ("distribute_lib__StrategyExtendedV2_update__1",),
    "variables.on_read_by_sum": ("distribute_lib__variable_sync_on_read_context__1",),
}

RESOLVER = "TensorFlow's own start of TPU hardware by a resolver; no other backend has it"

# Examples that stay without a case, by the reason.
NOT_COVERED = {
    "a strategy for the whole process, for notebooks, is not in the facade: a scope says which": (
        "distribute_lib__experimental_set_strategy__1",
    ),
    "tells workers from parameter servers, which synchronous training does not have": (
        "distribute_lib__StrategyBase_cluster_resolver__1",
    ),
    "a V1 graph-session call for optimizers of V1; V2 took it out": (
        "distribute_lib__StrategyExtendedV1_non_slot_devices__1",
    ),
    RESOLVER: (
        "tpu_strategy__TPUStrategyV2__1",
        "tpu_strategy__TPUStrategyV2__6",
        "tpu_strategy__TPUStrategy__1",
        "tpu_strategy__TPUStrategyV1_run__1",
    ),
}


def folder() -> Path:
    """Where the installed tf.distribute stands."""
    found = importlib.util.find_spec("tensorflow")
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parent / "python" / "distribute"


def examples(file: str) -> list[str]:
    """Names of a file's examples: file, path of the class or function, number in its docstring."""
    tree = ast.parse((folder() / f"{file}.py").read_text("utf-8"))
    return [
        f"{file}__{path}__{number}"
        for path, text in docstrings(tree, ())
        for number in range(1, count(text) + 1)
    ]


def docstrings(node: ast.AST, path: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Paths and docstrings of everything below a node that can have one."""
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
        yield "_".join(path) or "module", ast.get_docstring(node) or ""
    for child in ast.iter_child_nodes(node):
        name = child.name if isinstance(child, ast.ClassDef | ast.FunctionDef) else None
        yield from docstrings(child, (*path, name) if name else path)


def count(text: str) -> int:
    """How many examples a docstring has."""
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
    """The cases of examples, by the example."""
    found = registry.load("tests.facade")
    own = {name[len(THEME) :]: one for name, one in found.items() if name.startswith(THEME)}
    beside = {name: found[case] for case, names in COVERED_BY.items() for name in names}
    if both := own.keys() & beside.keys():
        raise ValueError(f"Expected one case an example. Received: {sorted(both)}.")
    return own | beside


def reasons() -> dict[str, str]:
    """Why an example has no case, by the example."""
    return {name: why for why, names in NOT_COVERED.items() for name in names}
