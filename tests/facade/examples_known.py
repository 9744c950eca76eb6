"""What the examples of tf.distribute's docstrings take from the text around them, and exceptions.

An example is named by the class or function, and its number in the docstring.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Known:
    """Examples that do not run as they stand, and the error that comes."""

    examples: str
    error: str  # a regular expression
    # Why it can run nowhere, or not on this backend. Without a reason the error says what to write.
    reason: str = ""
    backends: str = "tensorflow jax torch"


TWO = "tf.distribute.MirroredStrategy(['CPU:0', 'CPU:1'])"
ONE = "tf.distribute.OneDeviceStrategy('CPU:0')"
EPOCHS = f"""
my_strategy, EPOCHS, result = {TWO}, 2, tf.constant(1)
dataset = tf.data.Dataset.range(8).batch(4)
"""
IMAGES = """
inputs = [np.ones((8, 4, 8, 1), "float32")]
model = lambda images: images
"""
RESOLVERS = "SimpleClusterResolver = tf.distribute.cluster_resolver.SimpleClusterResolver\n"
UNION = "UnionResolver = tf.distribute.cluster_resolver.UnionResolver\n"

# Code before the first example of a docstring, or before one of its examples: what the text around
# it has said, or takes as known.
PREAMBLES = {
    **dict.fromkeys(
        ("get_replica_context", "in_cross_replica_context", "has_strategy",
         "StrategyExtendedV2_colocate_vars_with", "StrategyV1_experimental_make_numpy_dataset"),
        f"strategy = {TWO}",
    ),
    "experimental_set_strategy": f"""
strategy1, strategy2 = {TWO}, {ONE}
f = g = h = tf.distribute.get_strategy
""",
    "InputOptions": "experimental_replication_mode = tf.distribute.InputReplicationMode",
    "StrategyBase": EPOCHS,
    "MirroredStrategy 3": EPOCHS,
    "StrategyBase_reduce 3": "per_replica_result = strategy.run(lambda: tf.constant([1., 2.]))",
    "StrategyV1_make_input_fn_iterator": f"""
strategy, global_batch_size, replica_fn = {TWO}, 4, lambda batch: batch
""",
    # A comment goes on in a line of its own, without a number sign.
    "StrategyExtendedV2_update 1": "devices = None",
    "StrategyExtendedV1_call_for_each_replica": f"distribution = {TWO}",
    "ReplicaContext__update 2": """
inputs = tf.constant(1.)
computation = post_reduce_pre_update_computation = lambda value: value
""",
    "TPUStrategyV1_run 3": "dtypes = tf.dtypes",
    **dict.fromkeys(
        ("TPUStrategyV2_experimental_assign_to_logical_device",
         "TPUStrategyV2_experimental_split_to_logical_devices",
         "TPUStrategyV2_experimental_replicate_to_logical_devices"),
        IMAGES,
    ),
    "OneDeviceStrategy_distribute_datasets_from_function": f"""
strategy, global_batch_size, replica_fn = {ONE}, 4, lambda batch: batch
""",
    "OneDeviceStrategy_reduce": f"strategy = {ONE}",
    "_OptionsExported": """
grads, vars = [tf.constant(1.)], [tf.Variable(1.)]
optimizer = tf.keras.optimizers.SGD(0.1)
""",
    "CollectiveAllReduceStrategy 3": "iterator, NUM_STEP = iter(dist_dataset), 2",
    # What the cluster's software sets, here for one worker.
    "TFConfigClusterResolver 2": """
worker = {"cluster": {"worker": ["localhost:12345"]}, "task": {"type": "worker", "index": 0}}
os.environ["TF_CONFIG"] = json.dumps(worker)
""",
    "ClusterResolver_task_type": RESOLVERS,
    "ClusterResolver_task_id": RESOLVERS,
    "SimpleClusterResolver": RESOLVERS,
    "UnionClusterResolver": RESOLVERS + UNION,
    **{
        name: f"{name} = tf.distribute.cluster_resolver.{name}"
        for name in ("GCEClusterResolver", "KubernetesClusterResolver", "TFConfigClusterResolver")
    },
}  # fmt: skip

EXCEPTIONS = (
    # What to write instead, or the backend to use, is in the error.
    Known("StrategyBase_cluster_resolver 1, ClusterResolver_task_type 1, ClusterResolver_task_id 1",
          "no parameter servers.*Give a cluster"),
    Known("SimpleClusterResolver 1", "without num_accelerators.*Leave it out"),
    Known("UnionClusterResolver 1 2", "'UnionResolver'. Describe the cluster by"),
    Known("GCEClusterResolver 1", "'GCEClusterResolver'. Describe the cluster by"),
    Known("KubernetesClusterResolver 1", "`kerasdist info` lists what each source sets"),
    Known("HierarchicalCopyAllReduce 1, NcclAllReduce 1, ReductionToOneDevice 1",
          "Leave out cross_device_ops"),
    Known("DistributedIteratorInterface_get_next_as_optional 1",
          r"Write next\(iterator, None\)", backends="jax torch"),
    Known("DistributedDatasetInterface 3", "without input_signature.*Leave it out",
          backends="jax torch"),
    Known("ReplicaContext__update 1 2", r"_update'\. Write strategy\.extended\.update"),
    Known("InputOptions 1, TPUStrategyV2 1 2 3 4 5 6 7, TPUStrategyV2_run 1, TPUStrategy 1, "
          "TPUStrategyV1_run 1 2 3 4 5, TPUStrategyV2_experimental_assign_to_logical_device 1, "
          "TPUStrategyV2_experimental_split_to_logical_devices 1, "
          "TPUStrategyV2_experimental_replicate_to_logical_devices 1, "
          "TPUClusterResolver_connect 2",
          "KERAS_BACKEND=jax", backends="tensorflow torch"),
    Known("TPUClusterResolver_get_tpu_system_metadata 1", "Write topology = "),
    Known("StrategyBase 1, MirroredStrategy 3, TPUStrategyV2 5", "the batch as an argument",
          backends="jax"),
    # These run nowhere, or not with this framework's tensors.
    Known("StrategyExtendedV2_update 2, ReplicaContextBase_merge_call 1, "
          "CollectiveAllReduceStrategy 1, Strategy_experimental_distribute_values_from_function 4",
          "SyntaxError", "The example is not valid Python in TensorFlow's docstring."),
    Known("StrategyExtendedV1_non_slot_devices 1", "missing 1 required positional argument",
          "The example uses a class where an object of this class is needed."),
    Known("variable_sync_on_read_context 1", "NameError",
          "TensorFlow does not export this function. Call `all_reduce` in the replica instead."),
    Known("OneDeviceStrategy_experimental_distribute_dataset 1", "missing .*'device'",
          "The example leaves out the device, which TensorFlow requires, too."),
    Known("CentralStorageStrategy_reduce 1", "Expected axis|no attribute 'numpy'",
          "The example does not batch its dataset, so its last `reduce` gets scalars, which have "
          "no axis."),
    Known("_OptionsExported 1", "experimental_aggregate_gradients",
          "Keras 3's optimizers no longer have this argument. Leave it out."),
    Known("Hints 1 2", "NameError", "TensorFlow itself no longer takes `experimental_hints`."),
    Known("CollectiveAllReduceStrategy 2", "No loss to compute",
          "Keras 3 needs a loss in `compile`, also without a strategy.", "tensorflow torch"),
    Known("CollectiveAllReduceStrategy 3", "",
          "A `tf.GradientTape` records only operations of TensorFlow. Write "
          "`kerasdist.value_and_grad` instead.",
          "jax torch"),
    Known("OneDeviceStrategy 1", "no attribute 'device'",
          "A Keras variable has no attribute `device`.", "jax torch"),
    Known("OneDeviceStrategy_reduce 1", "no attribute 'numpy'",
          "An array of JAX has no method `numpy`. Write `np.asarray`.", "jax"),
    Known("TPUStrategyV2_experimental_assign_to_logical_device 1, "
          "TPUStrategyV2_experimental_split_to_logical_devices 1, "
          "TPUStrategyV2_experimental_replicate_to_logical_devices 1",
          "blocks that fit in the topology",
          "The example needs 8 devices, and the tests have 4. The test case needs only 4.", "jax"),
)  # fmt: skip
